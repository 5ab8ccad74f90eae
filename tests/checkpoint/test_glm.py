"""ChatGLM-6B checkpoints: every weight in its place, and no model from one that does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file

from glm_multiuser.checkpoint import load_checkpoint, write_huggingface
from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.model_config import ModelConfig
from tests.checkpoint.folders import (
    CONFIG,
    MODEL,
    Array,
    our_shapes,
    refused,
    their_arrays,
    write_folder,
    write_shards,
    write_stored_as,
)
from tests.golden_data import golden_folder

QKV = "transformer.layers.1.attention.query_key_value"


def load(folder: Path, config: ModelConfig = MODEL, dtype: str = "float32") -> dict[str, Array]:
    loaded: dict[str, Array] = {}
    parameters = {name: (shape, np.dtype(dtype)) for name, shape in our_shapes(config).items()}
    load_checkpoint(folder, config, parameters, loaded.__setitem__)
    assert loaded.keys() == parameters.keys()
    for name, (shape, wanted) in parameters.items():
        assert loaded[name].shape == shape
        assert loaded[name].dtype == wanted
        assert loaded[name].flags.c_contiguous
    return loaded


def check_layout(ours: dict[str, Array], theirs: dict[str, Array], config: ModelConfig) -> None:
    """Applies both layouts to the same hidden states, each in its own code's way."""
    random = np.random.default_rng(1)
    heads, head_dim = config.num_attention_heads, config.head_dim
    hidden = random.standard_normal((5, config.hidden_size))
    for layer in range(config.num_layers):
        prefix = f"transformer.layers.{layer}."
        qkv = f"{prefix}attention.query_key_value."
        # The original: x @ W.T + b, seen as [tokens, heads, 3 * head_dim], cut in three.
        mixed = np.einsum("ti,oi->to", hidden, theirs[f"{qkv}weight"]) + theirs[f"{qkv}bias"]
        expected = np.split(mixed.reshape(5, heads, 3 * head_dim), 3, axis=-1)
        # Ours: x @ W.T + b, cut in three, each seen as [tokens, heads, head_dim].
        found = np.split(hidden @ ours[f"{qkv}weight"].T + ours[f"{qkv}bias"], 3, axis=-1)
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one.reshape(5, heads, head_dim), other, rtol=1e-6)
        for linear in ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"):
            for name in (f"{prefix}{linear}.weight", f"{prefix}{linear}.bias"):
                np.testing.assert_array_equal(ours[name], theirs[name])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = prefix + norm
            np.testing.assert_array_equal(ours[f"{name}.gamma"], theirs[f"{name}.weight"])
            np.testing.assert_array_equal(ours[f"{name}.beta"], theirs[f"{name}.bias"])
    final = "transformer.final_layernorm."
    np.testing.assert_array_equal(ours[f"{final}gamma"], theirs[f"{final}weight"])
    np.testing.assert_array_equal(ours[f"{final}beta"], theirs[f"{final}bias"])
    embedding = "transformer.word_embeddings."
    np.testing.assert_array_equal(ours[f"{embedding}embedding_table"], theirs[f"{embedding}weight"])
    np.testing.assert_array_equal(ours["lm_head.weight"], theirs["lm_head.weight"])


@pytest.mark.parametrize("write", [write_folder, write_shards])
def test_layout(tmp_path: Path, write: Callable[..., Path]) -> None:
    theirs = their_arrays()
    check_layout(load(write(tmp_path, theirs)), theirs, MODEL)


def test_layout_of_an_original_folder() -> None:
    folder = golden_folder("chatglm_6b_3layers", "config.json", "model.safetensors")
    config = ModelConfig.from_folder(folder)
    check_layout(load(folder, config), load_file(folder / "model.safetensors"), config)


def test_query_rows_one_by_one(tmp_path: Path) -> None:
    """Two heads of size four: rows q0 k0 v0 q1 k1 v1 become rows q0 q1 k0 k1 v0 v1."""
    theirs = their_arrays()
    rows = np.arange(24, dtype=np.float32)
    theirs[f"{QKV}.bias"] = rows
    theirs[f"{QKV}.weight"] = np.repeat(rows[:, None], 8, axis=1)
    ours = load(write_folder(tmp_path, theirs))
    order = [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19, 8, 9, 10, 11, 20, 21, 22, 23]
    assert ours[f"{QKV}.bias"].tolist() == order
    assert ours[f"{QKV}.weight"].tolist() == [[row] * 8 for row in order]


@pytest.mark.parametrize("stored", ["float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["float16", "float32"])
def test_values_are_cast(tmp_path: Path, stored: str, wanted: str) -> None:
    theirs = their_arrays(dtype=stored)
    ours = load(write_folder(tmp_path, theirs), dtype=wanted)
    name = "transformer.layers.0.mlp.dense_h_to_4h.weight"
    np.testing.assert_array_equal(ours[name], theirs[name].astype(wanted))


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    theirs = their_arrays()
    theirs[f"{QKV}.bias"][3] = 70_000.0
    write_folder(tmp_path, theirs)
    assert load(tmp_path)[f"{QKV}.bias"].max() == 70_000.0
    with pytest.raises(CheckpointError, match=f"{QKV}.bias in .* beyond the range of float16"):
        load(tmp_path, dtype="float16")


def test_bfloat16_weights(tmp_path: Path) -> None:
    theirs = their_arrays()
    bias = theirs.pop("transformer.final_layernorm.bias")
    write_shards(tmp_path, theirs, shards=1)
    bits = bias.view(np.uint32) >> 16
    content = bits.astype("<u2").tobytes()
    write_stored_as(
        tmp_path / "more.safetensors", "transformer.final_layernorm.bias", "BF16", [8], content
    )
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["transformer.final_layernorm.bias"] = "more.safetensors"
    index.write_text(json.dumps(values))
    ours = load(tmp_path)
    np.testing.assert_array_equal(
        ours["transformer.final_layernorm.beta"], (bits << 16).view(np.float32)
    )


def test_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    theirs = their_arrays()
    for layer in range(2):
        name = f"transformer.layers.{layer}.attention.rotary_emb.inv_freq"
        theirs[name] = np.ones(1, np.float16)
    load(write_folder(tmp_path, theirs))


def test_progress_counts_the_parameters(tmp_path: Path) -> None:
    write_folder(tmp_path, their_arrays())
    parameters = {name: (shape, np.dtype("f4")) for name, shape in our_shapes().items()}
    seen: list[tuple[int, int, str]] = []
    assigned: list[str] = []

    def progress(done: int, total: int, name: str) -> None:
        assert len(assigned) == done
        seen.append((done, total, name))

    load_checkpoint(tmp_path, MODEL, parameters, lambda name, _: assigned.append(name), progress)
    assert [done for done, _, _ in seen] == list(range(len(parameters)))
    assert {total for _, total, _ in seen} == {len(parameters)}
    assert [name for _, _, name in seen] == assigned


def test_missing_tensor(tmp_path: Path) -> None:
    theirs = their_arrays()
    del theirs[f"{QKV}.weight"]
    refused(
        write_folder(tmp_path, theirs),
        rf"lacks {QKV}.weight, expected with shape \[24, 8\]; missing tensors: 1",
    )


def test_checkpoint_with_fewer_layers(tmp_path: Path) -> None:
    theirs = {name: one for name, one in their_arrays().items() if ".layers.1." not in name}
    refused(write_folder(tmp_path, theirs), "layers.1.attention.*missing tensors: 12")


def test_parameter_that_no_checkpoint_fills(tmp_path: Path) -> None:
    write_folder(tmp_path, their_arrays())
    parameters = {name: (shape, np.dtype("f4")) for name, shape in our_shapes().items()}
    parameters["transformer.layers.0.cache"] = ((4, 2), np.dtype("f4"))
    with pytest.raises(CheckpointError, match=r"lacks transformer.layers.0.cache.*\[4, 2\]"):
        load_checkpoint(tmp_path, MODEL, parameters, lambda _, __: None)


@pytest.mark.parametrize("name", ["transformer.layers.2.attention.dense.bias", "prefix_encoder"])
def test_superfluous_tensor(tmp_path: Path, name: str) -> None:
    theirs = {**their_arrays(), name: np.zeros((2, 4), np.float32)}
    refused(write_folder(tmp_path, theirs), rf"{name} \[2, 4\] in .* has no place")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (f"{QKV}.weight", (8, 24), r"\[8, 24\]; this model needs \[24, 8\]"),
        (f"{QKV}.bias", (8,), r"\[8\]; this model needs \[24\]"),
        ("lm_head.weight", (12, 8), r"\[12, 8\]; this model needs \[11, 8\]"),
        ("transformer.word_embeddings.weight", (11,), r"\[11\]; this model needs \[11, 8\]"),
    ],
)
def test_misshapen_tensor(tmp_path: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    theirs = {**their_arrays(), name: np.zeros(shape, np.float32)}
    refused(write_folder(tmp_path, theirs), f"{name} in .* has shape {expected}")


def test_written_folder_is_read_back(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    ours = {name: random.standard_normal(shape, "f4") for name, shape in our_shapes().items()}
    write_huggingface(tmp_path / "new", CONFIG, ours)
    assert ModelConfig.from_folder(tmp_path / "new") == MODEL
    loaded = load(tmp_path / "new")
    for name in ours:
        np.testing.assert_array_equal(loaded[name], ours[name])


def test_read_folder_is_written_back(tmp_path: Path) -> None:
    theirs = their_arrays(dtype="float16")
    write_folder(tmp_path / "old", theirs)
    write_huggingface(tmp_path / "new", CONFIG, load(tmp_path / "old", dtype="float16"))
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert written.keys() == theirs.keys()
    for name in theirs:
        assert written[name].dtype == np.float16
        np.testing.assert_array_equal(written[name], theirs[name])


def test_original_folder_is_written_back(tmp_path: Path) -> None:
    folder = golden_folder("chatglm_6b_3layers", "config.json", "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    write_huggingface(tmp_path, config, load(folder, ModelConfig.from_dict(config)))
    assert json.loads((tmp_path / "config.json").read_text()) == config
    original = load_file(folder / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert original.keys() - written.keys() == {
        f"transformer.layers.{layer}.attention.rotary_emb.inv_freq" for layer in range(3)
    }
    for name in written:
        np.testing.assert_array_equal(written[name], original[name])


def test_failed_writing_leaves_the_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {name: np.ones(shape, "f4") for name, shape in our_shapes().items()}
    write_huggingface(tmp_path, CONFIG, ours)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    target = "glm_multiuser.checkpoint.placement.to_their_layout"
    monkeypatch.setattr(target, full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_huggingface(tmp_path, CONFIG, {name: 2 * one for name, one in ours.items()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        ours = {name: np.ones(shape, "f4") for name, shape in our_shapes().items()}
        write_huggingface(tmp_path, CONFIG, ours)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_writing_needs_exactly_the_weights(tmp_path: Path) -> None:
    ours = {name: np.ones(shape, "f4") for name, shape in our_shapes().items()}
    with pytest.raises(CheckpointError, match=r"transformer.layers.0.cache is missing, or is no"):
        write_huggingface(tmp_path, CONFIG, {**ours, "transformer.layers.0.cache": np.ones(1)})
    del ours["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing"):
        write_huggingface(tmp_path, CONFIG, ours)
    with pytest.raises(ConfigError, match=r"model_type 'other' .* is not a model that can be read"):
        write_huggingface(tmp_path, {**CONFIG, "model_type": "other"}, ours)
    assert list(tmp_path.iterdir()) == []
