"""How keys and values lie in memory for the kernels.

    float32    keys [users, heads, tiles, head_dim, TILE]: those of `TILE` positions side by side,
               so that their scores are computed side by side;
               values [users, heads, positions, head_dim]
    bfloat16   the same; the bits, as int16
    int8       the same with head_dim + 4: in front of each tile the `TILE` float32 scales of its
               positions, in front of each position's values their own

bfloat16 is rounded to nearest, ties to even. int8 is symmetric, with one scale for the key and one
for the value of each head of a position: the largest magnitude becomes 127. A key or value that is
not finite has a scale that is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.packing import TILE

STORED = {"float32": np.float32, "bfloat16": np.int16, "int8": np.int8}
"""Type of a cache -> of the arrays that hold it."""

SCALE_BYTES = 4


def scale_bytes(dtype: str) -> int:
    """Of the key, or of the value, of one head of one position."""
    return SCALE_BYTES if dtype == "int8" else 0


def empty_cache(
    dtype: str, users: int, heads: int, positions: int, head_dim: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values, all of them zero, of a type in `STORED`."""
    numbers = head_dim + scale_bytes(dtype)
    keys = np.zeros((users, heads, math.ceil(positions / TILE), numbers, TILE), STORED[dtype])
    return keys, np.zeros((users, heads, positions, numbers), STORED[dtype])
