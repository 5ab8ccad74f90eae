"""Quantises weights to blocks of GGUF types."""

from __future__ import annotations

import ctypes

import numpy as np

from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint.gguf.blocks import BLOCK_TYPES, Bytes
from glm_multiuser.checkpoint.stored_tensor import Array

SEARCHED = ("q4_1", "q4_k", "q6_k")
"""Types whose scales and minima are searched for the least squared error, by the library."""

QUANTISED = ("q8_0", *SEARCHED)
"""Types that weights can be quantised to."""


def quantise(dtype: str, values: Array) -> tuple[Bytes, bool]:
    """float32 [outputs, inputs] -> uint8 [outputs, blocks, bytes], and whether all values are
    finite and within the type's range.

    Args:
        dtype: one of `QUANTISED`.
    """
    return _q8_0(values) if dtype == "q8_0" else _searched(dtype, values)


def _searched(dtype: str, values: Array) -> tuple[Bytes, bool]:
    block = next(one for one in BLOCK_TYPES.values() if one.name.lower() == dtype)
    blocks = np.empty((len(values), values.shape[1] // block.values, block.bytes), np.uint8)
    write = getattr(library.open_library(), f"glm_quantise_{dtype}")
    source, target = (ctypes.c_void_p(one.ctypes.data) for one in (values, blocks))
    count = ctypes.c_int64(blocks.shape[0] * blocks.shape[1])
    return blocks, bool(write(source, count, target))


def _q8_0(values: Array) -> tuple[Bytes, bool]:
    """The largest magnitude of 32 inputs becomes 127."""
    groups = values.reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
        steps = np.where(scales == 0, np.float32(np.inf), scales.astype(np.float32))
        numbers = np.clip(np.rint(groups / steps), -127, 127).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=1)
    return blocks.reshape(len(values), -1, blocks.shape[1]), bool(np.isfinite(scales).all())
