"""Writing safetensors one tensor at a time makes the file that `safetensors` makes at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from glm_multiuser.checkpoint.safetensors_file import save_safetensors
from tests.checkpoint.folders import Array, same


def test_the_same_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "b.weight": random.standard_normal((3, 5)).astype("f2"),
        "a.weight": random.standard_normal((2, 3)).astype("f4"),
        "c": random.standard_normal(7),
        "你好 \"'": random.standard_normal((1, 1)).astype("f4"),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5, np.float16),
    }
    sizes = {name: (one.shape, one.dtype) for name, one in arrays.items()}
    save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
    save_safetensors(tmp_path / "ours", sizes, reversed(arrays.items()))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert same(load_file(tmp_path / "ours"), arrays)


def test_half_a_file_is_none(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield "a", np.ones(3, np.float32)
        raise OSError("no space left on device")

    sizes = dict.fromkeys("ab", ((3,), np.dtype("f4")))
    with pytest.raises(OSError, match="no space"):
        save_safetensors(tmp_path / "model.safetensors", sizes, broken())
    assert list(tmp_path.iterdir()) == []
