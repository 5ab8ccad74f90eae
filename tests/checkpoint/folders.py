"""Small ChatGLM-6B checkpoints, made by the tests, and what becomes of those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from glm_multiuser.checkpoint import load_glm
from glm_multiuser.config import ModelConfig
from glm_multiuser.errors import CheckpointError

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
        load_glm(folder, MODEL, parameters, lambda name, _: assigned.append(name))
    assert assigned == []
