"""Weights of floating types into blocks of groups, as GGUF files have them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint.gguf.blocks import Bytes
from glm_multiuser.checkpoint.stored_tensor import Array


class _Block(NamedTuple):
    """What `glm_quantise_...` of the library writes."""

    inputs: int
    bytes: int


SEARCHED = {"q4_1": _Block(32, 20), "q4_k": _Block(256, 144), "q6_k": _Block(256, 210)}
"""Types whose scales and minima are searched for the least squared error."""

QUANTISED = ("q8_0", *SEARCHED)
"""Types that there is a way to quantise to."""


def quantise(dtype: str, values: Array) -> tuple[Bytes, bool]:
    """float32 [outputs, inputs] -> uint8 [outputs, blocks, bytes], and whether all values are
    finite and within the type's range.

    Args:
        dtype: one of `QUANTISED`.
    """
    return _q8_0(values) if dtype == "q8_0" else _searched(dtype, values)


def _searched(dtype: str, values: Array) -> tuple[Bytes, bool]:
    block = SEARCHED[dtype]
    blocks = np.empty((len(values), values.shape[1] // block.inputs, block.bytes), np.uint8)
    write = getattr(library.open_library(), f"glm_quantise_{dtype}")
    count = blocks.shape[0] * blocks.shape[1]
    return blocks, bool(write(values.ctypes.data, count, blocks.ctypes.data))


def _q8_0(values: Array) -> tuple[Bytes, bool]:
    """The largest magnitude of 32 inputs becomes 127."""
    groups = values.reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
        steps = np.where(scales == 0, np.float32(np.inf), scales.astype(np.float32))
        numbers = np.clip(np.rint(groups / steps), -127, 127).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=1)
    return blocks.reshape(len(values), -1, blocks.shape[1]), bool(np.isfinite(scales).all())
