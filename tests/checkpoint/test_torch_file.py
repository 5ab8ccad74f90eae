"""pytorch_model*.bin: the same arrays as from safetensors, and never any code."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest

from glm_multiuser.checkpoint import read_model_config, read_tensors
from glm_multiuser.checkpoint.torch_file import open_torch
from glm_multiuser.errors import CheckpointError
from tests.checkpoint.folders import (
    FAMILIES,
    QWEN2,
    arrays_of,
    load_folder,
    same,
    write_folder,
    write_json,
)
from tests.golden_data import golden_folder

FOLDERS = [
    "chatglm_6b_28layers",
    "chatglm_6b_3layers",
    "chatglm3_6b",
    "glm4",
    "glm4_remote_code_layout",
    "qwen2",
    "qwen2_tied",
    "e2e_chatglm_6b",
    "e2e_chatglm3_6b",
]


@pytest.fixture(scope="module")
def torch() -> Any:
    """Not at the top of this file, which every worker imports: PyTorch takes seconds."""
    return pytest.importorskip("torch", reason="torch is not installed: make torch")


def save(torch: Any, path: Path, arrays: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: torch.from_numpy(one) for name, one in arrays.items()}, path)
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_original_folders_give_the_same_arrays(torch: Any, tmp_path: Path, name: str) -> None:
    folder = golden_folder(name, "model.safetensors", "pytorch_model.bin.index.json")
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).symlink_to(path)
    assert same(dict(read_tensors(tmp_path)), dict(read_tensors(folder)))
    assert same(load_folder(tmp_path), load_folder(folder))
    assert read_model_config(tmp_path) == read_model_config(folder)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)
def test_one_file(torch: Any, tmp_path: Path, values: dict[str, Any], dtype: str) -> None:
    arrays = arrays_of(values, dtype)
    save(torch, tmp_path / "bin" / "pytorch_model.bin", arrays)
    write_folder(tmp_path / "safetensors", arrays)
    for kind in ("bin", "safetensors"):
        write_json(tmp_path / kind / "config.json", values)
    assert same(dict(read_tensors(tmp_path / "bin")), arrays)
    for wanted in ("float16", "float32"):
        loaded = load_folder(tmp_path / "bin", wanted)
        assert same(loaded, load_folder(tmp_path / "safetensors", wanted))


def test_bfloat16_is_the_upper_half_of_float32(torch: Any, tmp_path: Path) -> None:
    bits = np.arange(0x10000, dtype=np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(256, 256)
    torch.save({"w": tensor}, tmp_path / "pytorch_model.bin")
    found = dict(read_tensors(tmp_path))["w"]
    assert found.dtype == np.float32
    assert found.shape == (256, 256)
    np.testing.assert_array_equal(found.view(np.uint32).ravel(), bits.astype(np.uint32) << 16)


def test_tensors_that_share_or_turn_their_numbers(torch: Any, tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = OrderedDict(
        whole=whole,
        turned=whole.T,
        part=whole[1:, 1:3],
        scalar=torch.tensor(2.5),
        empty=torch.zeros(3, 0),
        parameter=torch.nn.Parameter(whole.clone()),
    )
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    expected = {name: one.detach().numpy() for name, one in tensors.items()}
    assert same(dict(read_tensors(tmp_path)), expected)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    arrays = arrays_of(QWEN2)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nobody looks at this")
    assert same(dict(read_tensors(write_folder(tmp_path, arrays))), arrays)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"nobody can read this")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"needs torch.*pip install 'glm-multiuser\[torch\]'"):
        dict(read_tensors(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda torch: {"w": torch.zeros(3, dtype=torch.int8)},
            r"w in .* is stored as torch\.int8",
        ),
        (
            lambda torch: {"w": torch.eye(3).to_sparse()},
            r"w in .* is stored as .* in torch\.sparse_coo",
        ),
        (lambda torch: {"w": torch.zeros(3, device="meta")}, "w in .* is stored as .* on meta"),
        (
            lambda torch: {"w": torch.zeros(1).expand(10**12)},
            r"w in .* has shape \[1000000000000\], and fewer numbers than that",
        ),
        (lambda torch: {"model": {"w": torch.zeros(3)}}, "'model' in .* is dict, not a tensor"),
        (lambda torch: {1: torch.zeros(3)}, "the name 1 in .* is no text"),
        (lambda torch: [torch.zeros(3)], "holds list, not tensors with names"),
    ],
)
def test_content_that_is_no_checkpoint(
    torch: Any, tmp_path: Path, content: Callable[[Any], Any], message: str
) -> None:
    torch.save(content(torch), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_torch(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("compression", "message"),
    [(ZIP_DEFLATED, "data.pkl in .* is compressed"), (ZIP_STORED, "entries of .* bytes; the file")],
)
def test_entries_that_unpack_to_more_than_the_file(
    torch: Any, tmp_path: Path, compression: int, message: str
) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "whole.bin")
    path = tmp_path / "pytorch_model.bin"
    with ZipFile(tmp_path / "whole.bin") as whole, ZipFile(path, "w", compression) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
        if compression == ZIP_STORED:  # every name of the directory with the same content
            packed.filelist += [entry for entry in packed.filelist if entry.file_size > 1000]
    with pytest.raises(CheckpointError, match=message):
        open_torch(path)


def test_format_from_before_torch_1_6(torch: Any, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is .* from torch 1\.6 on"):
        open_torch(path)


def test_damage_is_noticed_or_harmless(torch: Any, tmp_path: Path) -> None:
    path = save(torch, tmp_path / "pytorch_model.bin", {"w": np.ones((3, 2), np.float32)})
    original = path.read_bytes()
    random = np.random.default_rng(0)
    for place in random.integers(0, len(original), 100):
        damaged = bytearray(original)
        damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            tensors = open_torch(path)
        except CheckpointError:
            continue
        for tensor in tensors.values():
            assert tensor.read().shape == tensor.shape
