"""Values of every type have the bits that ggml's own code gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from glm_multiuser.checkpoint.gguf.blocks import BLOCK_TYPES
from glm_multiuser.checkpoint.gguf.file import PLAIN_TYPES
from glm_multiuser.checkpoint.stored_tensor import StoredTensor
from tests.golden_data import golden_folder

BLOCKS = {one.name: one for one in BLOCK_TYPES.values()}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(golden_folder("gguf_blocks") / "blocks.npz") as file:
        return dict(file)


def stored(name: str, content: np.ndarray, shape: tuple[int, ...]) -> StoredTensor:
    mapped = content.reshape(-1)
    return StoredTensor(name, Path("none"), name, shape, mapped=mapped, block_type=BLOCKS.get(name))


@pytest.mark.parametrize("name", [*PLAIN_TYPES.values(), *BLOCKS])
def test_bits_of_the_values(golden: dict[str, np.ndarray], name: str) -> None:
    kinds = [key.split("/")[1] for key in golden if key.startswith(f"{name}/") and "bytes" in key]
    assert kinds
    for kind in kinds:
        values = golden[f"{name}/{kind}/values"]
        found = stored(name, golden[f"{name}/{kind}/bytes"], values.shape).read()
        assert found.astype(np.float32).tobytes() == values.tobytes(), kind


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_some_of_the_values(golden: dict[str, np.ndarray], name: str) -> None:
    """From any number on, not only from the first one of a block."""
    values = golden[f"{name}/random_bytes/values"]
    tensor = stored(name, golden[f"{name}/random_bytes/bytes"], values.shape)
    for begin, end in [(0, 1), (31, 33), (32, 64), (100, 700), (values.size - 1, values.size)]:
        assert tensor.numbers(begin, end).tobytes() == values.reshape(-1)[begin:end].tobytes()


def test_an_infinite_scale_gives_no_warning() -> None:
    block = np.zeros(34, np.uint8)
    block[:2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert not np.isfinite(stored("Q8_0", block, (32,)).read()).any()
