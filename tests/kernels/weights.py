"""Packs weights, and reads them back element by element, in the layout documented in `packing`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.group_packing import AnyPacking
from glm_multiuser.backends.native.packing import PANEL, Packing

EPSILON = 2.0**-24
"""Half a unit in the last place of float32."""

SMALLEST_NORMAL = 2.0**-126


def round_to_bfloat16(values: Any) -> NDArray[np.float64]:
    """Rounds to nearest, ties to even, computed in float64."""
    exact = np.asarray(values, np.float64)
    _, exponents = np.frexp(np.where(np.isfinite(exact), exact, 0.0))
    units = np.ldexp(1.0, np.maximum(exponents - 8, -126 - 7))
    rounded = np.rint(exact / units) * units
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, exact), rounded)


OUTLIERS = 4
"""Outliers per row, which are not rounded to int8."""


def round_to_int8(
    x: NDArray[np.float32],
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """float32 [rows, inputs] -> integers up to 127, row scales [rows, 1], and the positions of the
    outliers [rows, up to OUTLIERS], the largest first; their integers are 0."""
    places = np.argsort(-np.abs(x), axis=1, kind="stable")[:, :OUTLIERS]
    others = x.copy()
    np.put_along_axis(others, places, np.float32(0), axis=1)
    largest = np.abs(others).max(axis=1, keepdims=True)
    largest = np.maximum(largest, np.float32(2.0**-100))
    numbers = np.rint(others * (np.float32(127) / largest))
    return numbers.astype(np.int64), largest / np.float32(127), places


def zeros_of(packing: AnyPacking) -> NDArray[Any]:
    """Memory for a packed weight."""
    return np.zeros(packing.shape, packing.array_dtype)


def pack_whole(packing: AnyPacking, weight: NDArray[Any]) -> NDArray[Any]:
    """A whole weight, in a type that `pack_rows` takes -> the packed array."""
    packed = zeros_of(packing)
    packing.pack_rows(weight, packed)
    return packed


def int8_numbers(packing: Packing, packed: NDArray[Any]) -> NDArray[np.int64]:
    """[outputs, inputs], without padding: the integers of int8 weights."""
    scales = np.ascontiguousarray(packed[:, : 4 * PANEL]).view(np.float32).reshape(-1)
    scales = scales[: packing.outputs, None].astype(np.float64)
    return np.rint(unpacked(packing, packed) / scales).astype(np.int64)


def unpacked_bits(packing: Packing, packed: NDArray[Any]) -> NDArray[Any]:
    """[outputs, inputs], without padding, for a type without scales."""
    output, column = np.meshgrid(
        np.arange(packing.outputs), np.arange(packing.inputs), indexing="ij"
    )
    panel, lane = output // PANEL, output % PANEL
    if packing.dtype == "bfloat16":
        return np.asarray(packed[panel, column // 2, lane, column % 2])
    return np.asarray(packed[panel, column, lane])


def unpacked(packing: Packing, packed: NDArray[Any]) -> NDArray[np.float64]:
    """[outputs, inputs], without padding."""
    if packing.dtype == "bfloat16":
        wide = unpacked_bits(packing, packed).view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    if packing.dtype != "int8":
        return unpacked_bits(packing, packed).astype(np.float64)
    output, column = np.meshgrid(
        np.arange(packing.outputs), np.arange(packing.inputs), indexing="ij"
    )
    panel, lane = output // PANEL, output % PANEL
    scales = np.ascontiguousarray(packed[:, : 4 * PANEL]).view(np.float32).astype(np.float64)
    place = 4 * PANEL + column // 2 * 2 * PANEL + 2 * lane + column % 2
    return packed[panel, place] * scales[panel, lane]
