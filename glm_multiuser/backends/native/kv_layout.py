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

Each head of each user begins on a page of its own (`pages.py`), so caches take physical memory by
the token. Positions after a user's last one are address space and nothing else.
"""

from __future__ import annotations

import math

import numpy as np

from glm_multiuser.backends.native import pages

TILE = 16
"""Positions of a key cache that lie side by side."""

STORED = {"float32": np.float32, "bfloat16": np.int16, "int8": np.int8}
"""Type of a cache -> of the arrays that hold it."""

SCALE_BYTES = 4
"""Of the float32 scale of an int8 key or value."""


def scale_bytes(dtype: str) -> int:
    """Of the key, or of the value, of one head of one position."""
    return SCALE_BYTES if dtype == "int8" else 0


def head_bytes(dtype: str, head_dim: int) -> int:
    """The key, or the value, of one head of one position; with its scale."""
    return head_dim * np.dtype(STORED[dtype]).itemsize + scale_bytes(dtype)


def capacity(dtype: str, positions: int, head_dim: int) -> int:
    """Positions that there is address space for: as many as end with a page, too."""
    if pages.SIZE == 1:
        return positions
    in_pages = pages.SIZE // math.gcd(pages.SIZE, head_bytes(dtype, head_dim))
    step = math.lcm(in_pages, TILE)
    return math.ceil(positions / step) * step


def head_sizes(dtype: str, positions: int, head_dim: int) -> tuple[int, int]:
    """Bytes of the keys, which are whole tiles, and of the values of one head."""
    one = head_bytes(dtype, head_dim)
    return math.ceil(positions / TILE) * TILE * one, positions * one


def held_bytes(dtype: str, heads: int, positions: int, head_dim: int) -> int:
    """Physical memory of so many positions of one user: whole pages for each head of each layer."""
    return heads * sum(map(pages.whole_pages, head_sizes(dtype, positions, head_dim)))


def cache_shapes(
    dtype: str, users: int, heads: int, positions: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the keys and of the values, in a type of `STORED`."""
    numbers = head_dim + scale_bytes(dtype)
    keys = (users, heads, math.ceil(positions / TILE), numbers, TILE)
    return keys, (users, heads, positions, numbers)
