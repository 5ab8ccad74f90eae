"""Memory layout of keys and values.

    float32    keys [users, heads, tiles, head_dim, TILE]: `TILE` positions are interleaved, so that
               their scores are computed in parallel;
               values [users, heads, positions, head_dim]
    bfloat16   the same; the bits, as int16
    int8       the same with head_dim + 4: each tile is preceded by the `TILE` float32 scales of its
               positions, and each position's value by its scale

bfloat16 is rounded to nearest, ties to even. int8 is symmetric, with one scale for the key and one
for the value of each head of a position: the largest magnitude becomes 127. The scale of a key or
value that is not finite is NaN.

Each head of each user begins on a page of its own (`pages.py`), so physical memory grows with the
number of tokens. Positions after a user's last one take address space only. In preallocated caches,
which return no pages, heads follow each other directly: gaps would take memory.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native import pages
from glm_multiuser.model_config import AnyModelConfig

TILE = 16
"""Positions of a key cache that are interleaved."""

STORED = {"float32": np.float32, "bfloat16": np.int16, "int8": np.int8}
"""Type of a cache -> type of its arrays."""

SCALE_BYTES = 4
"""Of the float32 scale of an int8 key or value."""


def scale_bytes(dtype: str) -> int:
    """Bytes of the scale of one head of one position."""
    return SCALE_BYTES if dtype == "int8" else 0


def head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of the key, or the value, of one head of one position, including its scale."""
    return head_dim * np.dtype(STORED[dtype]).itemsize + scale_bytes(dtype)


def capacity(dtype: str, positions: int, head_dim: int, preallocated: bool) -> int:
    """`positions`, rounded up so that each head ends at a page boundary, or with a whole tile if
    caches are preallocated."""
    if pages.SIZE == 1:
        return positions
    if preallocated:
        return math.ceil(positions / TILE) * TILE
    in_pages = pages.SIZE // math.gcd(pages.SIZE, head_bytes(dtype, head_dim))
    step = math.lcm(in_pages, TILE)
    return math.ceil(positions / step) * step


def head_sizes(dtype: str, positions: int, head_dim: int) -> tuple[int, int]:
    """Bytes of the keys, which are whole tiles, and of the values of one head."""
    one = head_bytes(dtype, head_dim)
    return math.ceil(positions / TILE) * TILE * one, positions * one


def clear_last_tile(keys: NDArray[np.uint8], dtype: str, positions: int, head_dim: int) -> None:
    """Clears the positions after the last one in the last tile of one head's keys: they may be of
    an earlier user of the slot.

    Args:
        keys: bytes of the tiles of `positions` positions.
    """
    in_last_tile = positions % TILE
    if in_last_tile == 0:
        return
    tile = keys[-TILE * head_bytes(dtype, head_dim) :]
    scales = TILE * scale_bytes(dtype)
    tile[in_last_tile * scale_bytes(dtype) : scales] = 0
    elements = tile[scales:].reshape(head_dim, TILE, np.dtype(STORED[dtype]).itemsize)
    elements[:, in_last_tile:] = 0


def held_bytes(
    config: AnyModelConfig, dtype: str, tokens: int, seq_length: int, preallocated: bool
) -> int:
    """Physical memory of the caches of a user with `tokens` tokens: whole pages for each head of
    each layer, and for all of `seq_length` if they are preallocated or cannot be returned."""
    positions = seq_length if pages.UNAVAILABLE else tokens
    if preallocated:
        positions = capacity(dtype, seq_length, config.head_dim, preallocated)
    one_head = sum(map(pages.whole_pages, head_sizes(dtype, positions, config.head_dim)))
    return config.num_layers * config.num_key_value_heads * one_head


def cache_shapes(
    dtype: str, users: int, heads: int, positions: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the keys and of the values."""
    elements = head_dim + scale_bytes(dtype)
    keys = (users, heads, math.ceil(positions / TILE), elements, TILE)
    return keys, (users, heads, positions, elements)
