"""The list of model families, and readers of a folder's small files.

A new family needs a layout and a line here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from glm_multiuser.checkpoint.files import read_json_object, read_optional
from glm_multiuser.checkpoint.gguf.config import gguf_generation_values, read_gguf_config
from glm_multiuser.checkpoint.gguf.find import find_gguf
from glm_multiuser.checkpoint.layouts import Layout, chatglm2, chatglm_6b, decoder, transformers
from glm_multiuser.checkpoint.layouts.fields import eos_token_ids
from glm_multiuser.checkpoint.placement import Places
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import AnyModelConfig, CausalConfig


class Family(NamedTuple):
    """A supported model family."""

    title: str
    layouts: tuple[Layout, ...]
    """Published layouts of its checkpoints, all for the same parameters."""
    mindformers: Optional[Callable[[Any], Places]] = None
    """Placements of MindFormers' `.ckpt` files."""


FAMILIES: dict[str, Family] = {
    "chatglm_6b": Family("ChatGLM-6B", (chatglm_6b.LAYOUT,), chatglm_6b.mindformers_placements),
    "chatglm2": Family(
        "ChatGLM2, ChatGLM3, GLM-4",
        (chatglm2.LAYOUT, transformers.GLM4),
        chatglm2.mindformers_placements,
    ),
    "glm4_0414": Family("GLM-4-0414", (transformers.GLM4_0414,)),
    "llama": Family(
        "Llama, SmolLM2, TinyLlama, Mistral", (transformers.LLAMA, transformers.MISTRAL)
    ),
    "qwen2": Family("Qwen2, Qwen2.5", (transformers.QWEN2,)),
    "qwen3": Family("Qwen3", (transformers.QWEN3,)),
}

GENERATION_FIELDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "do_sample": ("do_sample", (bool,)),
    "temperature": ("temperature", (int, float)),
    "top_k": ("top_k", (int,)),
    "top_p": ("top_p", (int, float)),
    "min_p": ("min_p", (int, float)),
    "repetition_penalty": ("repetition_penalty", (int, float)),
    "max_new_tokens": ("max_tokens", (int,)),
}
"""Key in `generation_config.json` -> field of `SamplingParams`, and its types."""


def layout_of_config(values: Mapping[str, Any]) -> Layout:
    """Returns the layout of a parsed `config.json`.

    Raises:
        ConfigError: an unsupported layout.
    """
    model_type, architectures = values.get("model_type"), values.get("architectures")
    if values.get("position_encoding_2d") and model_type in (None, "chatglm"):
        return chatglm_6b.LAYOUT
    layouts = [layout for family in FAMILIES.values() for layout in family.layouts]
    names = architectures if isinstance(architectures, list) else []
    for layout in layouts:
        if model_type in layout.model_types:
            return layout
        if model_type is None and any(name in layout.architectures for name in names):
            return layout
    model_types = sorted({one for layout in layouts for one in layout.model_types})
    raise ConfigError(
        f"model_type {model_type!r} with architectures {architectures!r} is not a model that can "
        f"be read; those are {', '.join(map(repr, model_types))} "
        f"({', '.join(family.title for family in FAMILIES.values())})"
    )


def read_model_config(folder: Path) -> AnyModelConfig:
    """Reads the model configuration of a folder or a GGUF file.

    Raises:
        CheckpointError: no `config.json`, one that is not a JSON object, an unknown architecture,
            a missing or invalid size, an unsupported feature, or a GGUF file that `open_gguf`
            rejects.
    """
    gguf = find_gguf(folder)
    if gguf is not None:
        return read_gguf_config(gguf)
    path = Path(folder) / "config.json"
    try:
        values = read_json_object(path)
    except CheckpointError as error:
        patterns = ("*.ckpt", "*.yaml") if os.path.isdir(folder) else ()
        theirs = [found for pattern in patterns for found in path.parent.glob(pattern)]
        if os.path.exists(path) or not theirs:
            raise
        raise CheckpointError(
            f"{error}; a yaml of MindFormers cannot stand in for Hugging Face's config.json"
        ) from error
    return model_config_of(values, path)


def model_config_of(values: Mapping[str, Any], path: Path) -> AnyModelConfig:
    """Like `read_model_config`, for the parsed `config.json` at `path`."""
    try:
        config: AnyModelConfig = layout_of_config(values).read_config(values)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config


def placements_of_names(config: AnyModelConfig, names: Collection[str]) -> Places:
    """Returns the placements of the family's layout with any of these names, or of its first."""
    all_places = [layout.placements(config) for layout in FAMILIES[config.family].layouts]
    return max(all_places, key=lambda places: any(name in places for name in names))


def mindformers_placements(config: AnyModelConfig) -> Places:
    """Returns the placements of MindFormers' `.ckpt` files.

    Raises:
        CheckpointError: MindFormers' layout of this family is unknown.
    """
    placements = FAMILIES[config.family].mindformers
    if placements is None:
        known = [repr(name) for name, family in FAMILIES.items() if family.mindformers]
        raise CheckpointError(
            f"family {config.family!r} has no .ckpt layout of MindFormers that can be read or "
            f"written; those are of {', '.join(known)}"
        )
    return placements(config)


def parameter_shapes(config: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight by our parameter's name."""
    return decoder.shapes(config) if isinstance(config, CausalConfig) else chatglm_6b.shapes(config)


def read_generation_defaults(folder: Path) -> dict[str, Any]:
    """Reads `generation_config.json`, or a GGUF file, into fields of `SamplingParams`.

    Returns:
        The fields that the file sets; empty without such a file. Other keys and null values are
        skipped. `do_sample: false` becomes a temperature of 0, which is greedy.

    Raises:
        CheckpointError: the file is unreadable, or a value has the wrong type.
    """
    gguf = find_gguf(folder)
    path = gguf or Path(folder) / "generation_config.json"
    values = gguf_generation_values(gguf) if gguf is not None else read_optional(path)
    defaults: dict[str, Any] = {}
    for key, (field, types) in GENERATION_FIELDS.items():
        value = values.get(key)
        if value is None:
            continue
        # bool is an int to Python, but `top_k: true` is a mistake.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(one.__name__ for one in types)
            raise CheckpointError(f"{key} in {path} is {value!r}; it must be {wanted}")
        defaults[field] = value
    if defaults.pop("do_sample", True) is False:
        defaults["temperature"] = 0.0
    return defaults


def read_end_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Reads `eos_token_id` of `generation_config.json`; empty without file or field, and for GGUF.

    Raises:
        CheckpointError: the file is unreadable, or has ids outside the vocabulary.
    """
    path = Path(folder) / "generation_config.json"
    values = read_optional(path) if find_gguf(folder) is None else {}
    if values.get("eos_token_id") is None:
        return ()
    try:
        return eos_token_ids(values, vocab_size)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
