"""Weights of floating types into blocks of groups, as files have them."""

from __future__ import annotations

import numpy as np

from glm_multiuser.backends.native import library
from glm_multiuser.checkpoint.gguf.blocks import Bytes
from glm_multiuser.checkpoint.stored_tensor import Array


def quantise_int4(values: Array) -> tuple[Bytes, bool]:
    """float32 [outputs, inputs] -> uint8 [outputs, blocks, bytes] of Q4_1, and whether all values
    are finite and within the type's range.

    Of several scales and minima each group of 32 inputs gets those with the least squared error.
    """
    blocks = np.empty((len(values), values.shape[1] // 32, 20), np.uint8)
    quantise = library.open_library().glm_quantise_int4
    finite = quantise(values.ctypes.data, values.size // 32, blocks.ctypes.data)
    return blocks, bool(finite)


def quantise_q8_0(values: Array) -> tuple[Bytes, bool]:
    """As `quantise_int4`: the largest magnitude of 32 inputs becomes 127."""
    groups = values.reshape(-1, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
        steps = np.where(scales == 0, np.float32(np.inf), scales.astype(np.float32))
        numbers = np.clip(np.rint(groups / steps), -127, 127).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=1)
    return blocks.reshape(len(values), -1, blocks.shape[1]), bool(np.isfinite(scales).all())
