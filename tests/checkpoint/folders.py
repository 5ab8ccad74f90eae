"""Small checkpoints, made by the tests, and what becomes of those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from glm_multiuser.checkpoint import load_checkpoint, read_model_config
from glm_multiuser.checkpoint.families import layout_of_config, parameter_shapes
from glm_multiuser.errors import CheckpointError
from glm_multiuser.model_config import ModelConfig

Array = NDArray[Any]

CONFIG = {
    "model_type": "chatglm",
    "position_encoding_2d": True,
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "inner_hidden_size": 16,
}
MODEL = ModelConfig.from_dict(CONFIG)

CHATGLM2 = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "padded_vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 6,
    "seq_length": 64,
    "add_qkv_bias": True,
    "eos_token_id": 2,
}
GLM4 = {
    "model_type": "glm",
    "architectures": ["GlmForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 6,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [2],
}
"""The same model."""

QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
LLAMA = {**QWEN2, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = {
    **{**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "sliding_window": None,
}
QWEN3 = {**QWEN2, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 6}
GLM4_0414 = {**GLM4, "model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "chatglm_6b": CONFIG,
    "chatglm2": CHATGLM2,
    "glm4": GLM4,
    "glm4_0414": GLM4_0414,
    "llama": LLAMA,
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2 tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3 with biases": {**QWEN3, "attention_bias": True},
}
"""A config.json of every published layout, and of what families have in some of their models."""


def our_shapes(config: ModelConfig = MODEL) -> dict[str, tuple[int, ...]]:
    """The parameters of the model, written down without the library's own tables."""
    hidden, inner, vocab = config.hidden_size, config.inner_hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.word_embeddings.embedding_table": (vocab, hidden),
        "transformer.final_layernorm.gamma": (hidden,),
        "transformer.final_layernorm.beta": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"transformer.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.gamma"] = (hidden,)
            shapes[f"{prefix}.{norm}.beta"] = (hidden,)
        for linear, size in {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }.items():
            shapes[f"{prefix}.{linear}.weight"] = size
            shapes[f"{prefix}.{linear}.bias"] = size[:1]
    return shapes


def their_arrays(config: ModelConfig = MODEL, dtype: str = "float32") -> dict[str, Array]:
    """Random tensors under the names and in the shapes of Hugging Face's ChatGLM-6B."""
    random = np.random.default_rng(0)
    arrays = {}
    for name, shape in our_shapes(config).items():
        their_name = name.replace("embedding_table", "weight")
        their_name = their_name.replace("gamma", "weight").replace("beta", "bias")
        arrays[their_name] = random.standard_normal(shape).astype(dtype)
    return arrays


def arrays_of(values: dict[str, Any], dtype: str = "float32") -> dict[str, Array]:
    """Random tensors under the names and in the shapes of the layout that a config.json names."""
    layout = layout_of_config(values)
    config = layout.read_config(values)
    shapes, random = parameter_shapes(config), np.random.default_rng(0)
    return {
        name: random.standard_normal(place.shape(shapes)).astype(dtype)
        for name, place in layout.placements(config).items()
        if place is not None
    }


def load_folder(folder: Path, dtype: str = "float32") -> dict[str, Array]:
    """What a folder gives for each parameter of the model that its config.json describes."""
    config = read_model_config(folder)
    shapes = parameter_shapes(config)
    loaded: dict[str, Array] = {}
    parameters = {name: (shape, np.dtype(dtype)) for name, shape in shapes.items()}
    load_checkpoint(folder, config, parameters, loaded.__setitem__)
    assert {name: one.shape for name, one in loaded.items()} == shapes
    assert {one.dtype.name for one in loaded.values()} == {dtype}
    return loaded


def same(found: dict[str, Array], expected: dict[str, Array]) -> bool:
    """Names, dtypes, shapes and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype
        and found[name].shape == one.shape
        and found[name].tobytes() == one.tobytes()
        for name, one in expected.items()
    )


def write_folder(folder: Path, arrays: dict[str, Array]) -> Path:
    """One `model.safetensors` with these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, arrays: dict[str, Array], shards: int = 3) -> Path:
    """The same, dealt out over several files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(arrays)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: arrays[name] for name in names[shard::shards]}, folder / file)
        weight_map.update(dict.fromkeys(names[shard::shards], file))
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def write_stored_as(path: Path, name: str, dtype: str, shape: list[int], content: bytes) -> None:
    """A file with one tensor of any dtype, assembled by hand after the format's description."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(content)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)


def refused(folder: Path, message: str) -> None:
    """Nothing may be assigned from a checkpoint that does not fit."""
    parameters = {name: (shape, np.dtype("f4")) for name, shape in our_shapes().items()}
    assigned: list[str] = []
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, MODEL, parameters, lambda name, _: assigned.append(name))
    assert assigned == []
