"""bfloat16 for numpy, which lacks the type: as its bits, the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS: np.dtype[Any] = np.dtype("<u2")
"""Array type of bfloat16 values; unambiguous, because weights are never integers."""

INFINITE = np.uint16(0x7F80)
"""The exponent's bits; in non-finite numbers all are set."""


def to_bfloat16(values: NDArray[np.floating[Any]]) -> NDArray[np.uint16]:
    """float32 -> `BITS`, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(BITS)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """`BITS` -> float32, exactly."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no number is infinite or NaN, of any floating type or `BITS`."""
    if values.dtype == BITS:
        return bool(((values & INFINITE) != INFINITE).all())
    return bool(np.isfinite(values).all())
