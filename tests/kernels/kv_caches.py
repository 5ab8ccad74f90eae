"""Caches of every type, read and written byte by byte as `kv_layout` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.kv_layout import SCALE_BYTES, STORED, TILE
from tests.kernels.memory import placed
from tests.kernels.weights import round_to_bfloat16

NAN = 0xFF
"""Bytes that are NaN in float32 and bfloat16; in int8 they make the scale NaN."""


@dataclass
class Cache:
    """Of a cell of one user: [1, kv_heads, tiles, numbers, TILE] and [1, kv_heads, capacity,
    numbers]. A cell of several users has that many in the first dimension."""

    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def dtype(self) -> str:
        return next(name for name, stored in STORED.items() if stored == self.keys.dtype)

    def copy(self) -> Cache:
        return Cache(placed(self.keys), placed(self.values))

    def positions(self, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Keys and values of the first positions, [kv_heads, count, head_dim] each."""
        keys, values = self.rows(count)
        return widened(keys, self.dtype), widened(values, self.dtype)

    def rows(self, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The same as stored, [kv_heads, count, bytes], the scale first."""
        scales, numbers = self._key_bytes()
        heads, tiles = numbers.shape[:2]
        rows = np.moveaxis(numbers, 2, 3).reshape(heads, tiles, TILE, -1)
        rows = np.concatenate([scales, rows], axis=3).reshape(heads, tiles * TILE, -1)
        return rows[:, :count], bytes_of(self.values[0, :, :count])

    def forget(self, position: int) -> None:
        """Sets all bits of a position to NaN."""
        tile, lane = divmod(position, TILE)
        scales, numbers = self._key_bytes()
        scales[:, tile, lane] = numbers[:, tile, :, lane] = NAN
        if position < self.values.shape[2]:
            self.values.view(np.uint8)[0, :, position] = NAN

    def fill(self, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Rows [kv_heads, tiles * TILE, head_dim] and [kv_heads, capacity, head_dim], rounded."""
        scales, numbers = self._key_bytes()
        rows = rounded(keys, self.dtype)
        split = scales.shape[-1]
        scales[...] = rows[..., :split].reshape(scales.shape)
        tiled = rows[..., split:].reshape(*numbers.shape[:2], TILE, *numbers.shape[2::2])
        numbers[...] = np.moveaxis(tiled, 2, 3)
        self.values.view(np.uint8)[0] = rounded(values, self.dtype)

    def _key_bytes(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Views: scales [kv_heads, tiles, TILE, their bytes], and numbers [kv_heads, tiles,
        head_dim, TILE, bytes of one]."""
        heads, tiles = self.keys.shape[1:3]
        size, split = self.keys.itemsize, SCALE_BYTES * (self.dtype == "int8")
        tiled = self.keys[0].view(np.uint8).reshape(heads, tiles, -1)
        scales = tiled[:, :, : TILE * split].reshape(heads, tiles, TILE, split)
        return scales, tiled[:, :, TILE * split :].reshape(heads, tiles, -1, TILE, size)


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def rounded(rows: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Rows [..., head_dim] as stored in a cache of this type, [..., bytes]."""
    if dtype == "float32":
        return bytes_of(rows)
    if dtype == "bfloat16":
        exact = round_to_bfloat16(rows).astype(np.float32)
        return bytes_of((bytes_of(exact).view(np.uint32) >> 16).astype(np.uint16))
    scales = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    numbers = np.clip(np.rint(rows / divisors), -127, 127).astype(np.int8)
    return np.concatenate([bytes_of(scales), bytes_of(numbers)], axis=-1)


def widened(rows: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """The numbers of rows of bytes, [..., head_dim]."""
    if dtype == "int8":
        scales = bytes_of(rows[..., :SCALE_BYTES]).view(np.float32)
        numbers = bytes_of(rows[..., SCALE_BYTES:]).view(np.int8)
        return numbers.astype(np.float64) * scales.astype(np.float64)
    if dtype == "bfloat16":
        wide = bytes_of(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    return bytes_of(rows).view(np.float32).astype(np.float64)
