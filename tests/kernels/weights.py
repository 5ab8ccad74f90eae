"""Packed weights read back, number by number, as the docstring of `packing` describes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.packing import PANEL, Packing

EPSILON = 2.0**-24
"""Half a unit in the last place of float32."""

SMALLEST_NORMAL = 2.0**-126


def round_to_bfloat16(values: Any) -> NDArray[np.float64]:
    """To nearest, ties to even, worked out in float64."""
    exact = np.asarray(values, np.float64)
    _, exponents = np.frexp(np.where(np.isfinite(exact), exact, 0.0))
    units = np.ldexp(1.0, np.maximum(exponents - 8, -126 - 7))
    rounded = np.rint(exact / units) * units
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, exact), rounded)


def from_bfloat16(values: NDArray[np.int16]) -> NDArray[np.float64]:
    wide = values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).astype(np.float64)


def unpacked(packing: Packing, packed: NDArray[Any]) -> NDArray[np.float64]:
    """[outputs, inputs], without the filling."""
    output, column = np.meshgrid(
        np.arange(packing.outputs), np.arange(packing.inputs), indexing="ij"
    )
    panel, lane = output // PANEL, output % PANEL
    if packing.dtype == "float32":
        return packed[panel, column, lane].astype(np.float64)
    if packing.dtype == "bfloat16":
        return from_bfloat16(packed[panel, column // 2, lane, column % 2])
    scales = np.ascontiguousarray(packed[:, : 4 * PANEL]).view(np.float32).astype(np.float64)
    place = 4 * PANEL + column // 2 * 2 * PANEL + 2 * lane + column % 2
    return packed[panel, place] * scales[panel, lane]
