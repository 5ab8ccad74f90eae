"""Reads the model configuration from the metadata of a GGUF file.

The metadata is converted to a `config.json` of transformers, so that the same layouts check it. The
keys are those of `gguf-py/gguf/constants.py` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from glm_multiuser.checkpoint.gguf.file import GGUFFile, Strings, open_gguf
from glm_multiuser.checkpoint.gguf.rope import (
    FACTORS,
    as_llama3,
    rope_scaling_values,
    scaling_by_factors,
)
from glm_multiuser.checkpoint.layouts import Layout, transformers
from glm_multiuser.checkpoint.layouts.fields import only
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import CausalConfig, check_size


class Architecture(NamedTuple):
    """A supported model of llama.cpp."""

    layout: Layout
    """The layout of transformers for the same model."""
    permuted: bool = False
    """Whether the two halves of each query and key head are interleaved row by row."""


ARCHITECTURES = {
    "llama": Architecture(transformers.LLAMA, permuted=True),
    "qwen2": Architecture(transformers.QWEN2),
    "qwen3": Architecture(transformers.QWEN3),
    "chatglm": Architecture(transformers.GLM4),
    "glm4": Architecture(transformers.GLM4_0414),
}
"""`general.architecture` -> model."""

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"

TOKENS = "tokenizer.ggml.tokens"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys after "tokenizer.ggml.": ids that end a text, a turn, and a message with calls."""
LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
"""Those of `tokenizer.ggml.model` "llama" in files without any, as in llama.cpp."""

COMPUTED = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "rope.scaling.attn_factor": 1.0,
}
"""Keys after the architecture's name, with their only supported value."""

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key after "general.sampling." -> key in `generation_config.json`."""


def architecture_of(file: GGUFFile) -> Architecture:
    """Returns the architecture; raises CheckpointError for an unsupported one."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture of {file.path} is {name!r}; those that can be read are "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def read_gguf_config(path: Path) -> CausalConfig:
    """Reads the model configuration of a GGUF file.

    Raises:
        CheckpointError: a file that `open_gguf` rejects, an unknown architecture, a missing or
            invalid size, or an unsupported feature.
    """
    file = open_gguf(path)
    architecture = architecture_of(file)
    try:
        return _config(file, architecture)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _config(file: GGUFFile, architecture: Architecture) -> CausalConfig:
    values = config_values(file, architecture)
    config: CausalConfig = architecture.layout.read_config(values)
    key = f"{file.metadata['general.architecture']}.rope.dimension_count"
    rotary_dim = file.metadata.get(key, config.rotary_dim)
    check_size(key, rotary_dim)
    if architecture.permuted and rotary_dim != config.head_dim:
        raise ConfigError(f"{key} is {rotary_dim!r}; only {config.head_dim} is computed here")
    return replace(
        config,
        rotary_dim=rotary_dim,
        rotary_interleaved=config.rotary_interleaved and not has_sections(file),
        rope_scaling=scaling_by_factors(file, rotary_dim, config.rope_scaling),
        dense_bias="blk.0.attn_output.bias" in file.tensors,
    )


def has_sections(file: GGUFFile) -> bool:
    """Whether the model uses M-RoPE, as GLM-4.1V: llama.cpp then rotates the two halves of a head,
    and its converter orders rows for that. For text, all dimensions of a position are equal. The
    condition is `use_mrope` in `llama-hparams.cpp`."""
    architecture = file.metadata.get("general.architecture")
    sections = file.metadata.get(f"{architecture}.rope.dimension_sections")
    return isinstance(sections, np.ndarray) and int((sections[:2] > 0).sum()) == 2


def config_values(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    """Converts the metadata to the fields of a `config.json`.

    Raises:
        ConfigError: missing, inconsistent or unsupported metadata.
    """
    prefix = f"{file.metadata['general.architecture']}."
    own = {
        key[len(prefix) :]: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }

    def required(name: str) -> Any:
        if name not in own:
            raise ConfigError(f"{prefix}{name} is missing")
        return own[name]

    hidden, heads = required("embedding_length"), required("attention.head_count")
    only(own, COMPUTED)
    values: dict[str, Any] = {
        "model_type": architecture.layout.model_types[0],
        "architectures": list(architecture.layout.architectures[:1]),
        "vocab_size": _vocab_size(file, own),
        "hidden_size": hidden,
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "intermediate_size": required("feed_forward_length"),
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": required("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling_values(own),
        "attention_bias": any(f"blk.0.attn_{one}.bias" in file.tensors for one in ("q", "qkv")),
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "eos_token_id": _end_of_text(file),
    }
    head_dim = own.get("attention.key_length")
    if head_dim is not None:
        values["head_dim"] = head_dim
        only(own, {"attention.value_length": head_dim})
    elif isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and not hidden % heads:
        values["head_dim"] = hidden // heads
    return values


def gguf_config_json(path: Path) -> dict[str, Any]:
    """Returns the content of a `config.json` for the same model.

    Raises:
        CheckpointError: a file that `read_gguf_config` rejects, or a model that a `config.json` of
            its layout cannot describe.
    """
    file, config = open_gguf(path), read_gguf_config(path)
    layout = architecture_of(file).layout
    values = config_values(file, architecture_of(file))
    if config.rotary_dim != config.head_dim:
        values["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    llama3 = as_llama3(config)
    if llama3 is not None:
        config = replace(config, rope_scaling=llama3)
        values["rope_scaling"] = {
            "rope_type": llama3.kind,
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_positions,
        }
    try:
        is_described = layout.read_config(values) == config
    except ConfigError:
        is_described = False
    if not is_described:
        raise CheckpointError(
            f"{path} has a model that no config.json of {layout.architectures[0]} describes, "
            f"because of {FACTORS}, its rotary dimensions or its biases; give the original "
            "one with --config"
        )
    return {name: value for name, value in values.items() if value is not None}


def _vocab_size(file: GGUFFile, own: Mapping[str, Any]) -> object:
    found: dict[str, Any] = {"vocab_size": own["vocab_size"]} if "vocab_size" in own else {}
    tokens = file.metadata.get(TOKENS)
    if isinstance(tokens, Strings):
        found[TOKENS] = tokens.number
    if EMBEDDING in file.tensors:
        found[EMBEDDING] = (*file.tensors[EMBEDDING].shape, 0)[0]
    if not found:
        raise ConfigError(f"vocab_size, {TOKENS} and {EMBEDDING} are missing")
    first, *others = found.values()
    if any(one != first for one in others):
        sizes = ", ".join(f"{size} by {name}" for name, size in found.items())
        raise ConfigError(f"the vocabulary has different sizes: {sizes}")
    return first


def _end_of_text(file: GGUFFile) -> object:
    ids = [file.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        ids.append(LLAMA_IDS["eos_token_id"])
    for one in ids:
        if one is not None:
            return one
    raise ConfigError(f"tokenizer.ggml.{END_KEYS[0]} is missing")


def gguf_generation_values(path: Path) -> dict[str, Any]:
    """Returns the fields of a `generation_config.json`; few files have any."""
    metadata = open_gguf(path).metadata
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
