"""Reading weight files: what is in them arrives unchanged, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_multiuser.checkpoint import read_model_config, read_tensors
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import (
    same,
    their_arrays,
    write_folder,
    write_json,
    write_shards,
    write_stored_as,
)
from tests.golden_data import golden_folder


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("write", [write_folder, write_shards])
def test_reads_what_was_written(tmp_path: Path, write: Callable[..., Path], dtype: str) -> None:
    arrays = their_arrays(dtype=dtype)
    assert same(dict(read_tensors(write(tmp_path, arrays))), arrays)


def test_reads_an_original_folder() -> None:
    from safetensors.numpy import load_file

    folder = golden_folder("chatglm_6b_3layers", "model.safetensors")
    assert same(dict(read_tensors(folder)), load_file(folder / "model.safetensors"))


def test_single_file_is_preferred_to_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, {"old": np.zeros(2, np.float32)}, shards=1)
    write_folder(tmp_path, {"new": np.ones(2, np.float32)})
    assert [name for name, _ in read_tensors(tmp_path)] == ["new"]


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    arrays = {"empty": np.zeros((3, 0), np.float32), "scalar": np.array(2.5, np.float32)}
    assert same(dict(read_tensors(write_folder(tmp_path, arrays))), arrays)


@given(st.lists(st.integers(0, 0xFFFF), min_size=1))
def test_bfloat16_is_the_upper_half_of_float32(
    tmp_path_factory: pytest.TempPathFactory, halves: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("bfloat16")
    content = b"".join(half.to_bytes(2, "little") for half in halves)
    write_stored_as(folder / "model.safetensors", "w", "BF16", [len(halves)], content)
    ((name, found),) = read_tensors(folder)
    assert name == "w"
    assert found.dtype == np.float32
    assert found.view(np.uint32).tolist() == [half << 16 for half in halves]


def test_bfloat16_values_that_are_known(tmp_path: Path) -> None:
    content = bytes.fromhex("803f 00c0 4940 807f")
    write_stored_as(tmp_path / "model.safetensors", "w", "BF16", [2, 2], content)
    assert dict(read_tensors(tmp_path))["w"].tolist() == [[1.0, -2.0], [3.140625, float("inf")]]


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "BOOL", "F8_E4M3"])
def test_whole_numbers_are_refused(tmp_path: Path, dtype: str) -> None:
    size = {"I32": 4}.get(dtype, 1)
    write_stored_as(tmp_path / "model.safetensors", "w", dtype, [3], bytes(3 * size))
    with pytest.raises(CheckpointError, match=f"w in .* is stored as {dtype}"):
        dict(read_tensors(tmp_path))


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights in"):
        dict(read_tensors(tmp_path))
    with pytest.raises(CheckpointError, match="no weights in"):
        dict(read_tensors(tmp_path / "not_there"))
    with pytest.raises(CheckpointError, match=r"cannot read .*: File name too long"):
        read_model_config(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    "name", ["pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"]
)
def test_shards_without_their_index(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name} and no index: neither model.safetensors.i"):
        dict(read_tensors(tmp_path))


@pytest.mark.parametrize("kept", [0, 5, 8, 60, -1])
def test_file_cut_short(tmp_path: Path, kept: int) -> None:
    path = write_folder(tmp_path, their_arrays()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is broken, cut short"):
        dict(read_tensors(tmp_path))


def test_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 13\n")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        dict(read_tensors(tmp_path))


def test_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*model.safetensors"):
        dict(read_tensors(tmp_path))


def test_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    path = write_folder(tmp_path, their_arrays()) / "model.safetensors"
    tensors = read_tensors(tmp_path)
    next(tensors)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read .* from .*model.safetensors"):
        list(tensors)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"w": "absent.safetensors"}}, "names absent.safetensors, which is not"),
        ({"weight_map": {"w": "../up.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"w": 3}}, "not a file beside it"),
        ({"weight_map": {"other": "shard.safetensors"}}, "other in shard.safetensors, but that"),
        ({"weight_map": {}}, "weight_map in"),
        ({"weight_map": "shard.safetensors"}, "weight_map in"),
        ({}, "weight_map in"),
        ([], "holds list, not a JSON object"),
    ],
)
def test_index_that_does_not_fit(tmp_path: Path, index: object, message: str) -> None:
    write_folder(tmp_path, {"w": np.zeros(2, np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "shard.safetensors")
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=message):
        dict(read_tensors(tmp_path))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_index_that_is_not_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not JSON"):
        dict(read_tensors(tmp_path))
