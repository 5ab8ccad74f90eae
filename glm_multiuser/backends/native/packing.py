"""How weights lie in memory for the kernels.

A weight [out, in] is cut into panels of `PANEL` outputs, the last one filled up with zeros. In a
panel the outputs of one input lie side by side, so a product reads memory in order:

    float32    [panels, in, PANEL]
    float16    the same
    bfloat16   [panels, in / 2, PANEL, 2]: two inputs together, as the processor multiplies them;
               the bits, as int16
    int8       [panels, PANEL * 4 + in * PANEL]: float32 scales of the outputs, then as bfloat16

float16 and bfloat16 are rounded to nearest, ties to even. int8 is symmetric, one scale per output:
the largest magnitude becomes 127 (Jacob et al. 2018, without a zero point).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.bfloat16 import BITS, to_bfloat16

PANEL = 32
SCALE_BYTES = 4 * PANEL
TILE = 16
"""Positions of a key cache that lie side by side."""

STORED = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.int16,
    "int8": np.int8,
}
"""Type of a weight -> of the array that holds it."""

BLOCK_PANELS = 64
"""What is packed at a time, so that a large weight is not in memory three times."""


@dataclass(frozen=True)
class Packing:
    """One weight [outputs, inputs] of a type in `STORED`."""

    dtype: str
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the packed array."""
        panels, pairs = math.ceil(self.outputs / PANEL), math.ceil(self.inputs / 2)
        if self.dtype in ("float32", "float16"):
            return panels, self.inputs, PANEL
        if self.dtype == "bfloat16":
            return panels, pairs, PANEL, 2
        return panels, SCALE_BYTES + 2 * pairs * PANEL

    @property
    def itemsize(self) -> int:
        """Bytes of one of its numbers."""
        return np.dtype(STORED[self.dtype]).itemsize

    @property
    def unpacked_dtype(self) -> np.dtype[Any]:
        """Of what `pack` takes without rounding it, except to int8; `bfloat16.BITS` is one."""
        return {"float16": np.dtype(np.float16), "bfloat16": BITS}.get(self.dtype, np.dtype("f4"))

    def zeros(self) -> NDArray[Any]:
        return np.zeros(self.shape, STORED[self.dtype])

    def pack(self, weight: NDArray[Any]) -> NDArray[Any]:
        """float32 or `unpacked_dtype` [outputs, inputs] -> the packed array."""
        packed = self.zeros()
        for first in range(0, len(packed), BLOCK_PANELS):
            block = weight[first * PANEL : (first + BLOCK_PANELS) * PANEL]
            if self.dtype == "bfloat16" and block.dtype != BITS:
                block = to_bfloat16(block)
            block = block.astype(self.unpacked_dtype, copy=False)
            missing = -len(block) % PANEL
            if missing:
                block = np.pad(block, ((0, missing), (0, 0)))
            self._pack_block(block, packed[first : first + BLOCK_PANELS])
        return packed

    def _pack_block(self, weight: NDArray[Any], packed: NDArray[Any]) -> None:
        if self.dtype in ("float32", "float16"):
            packed[:] = weight.reshape(-1, PANEL, self.inputs).transpose(0, 2, 1)
            return
        if self.dtype == "int8":
            scales = np.abs(weight).max(axis=1) / np.float32(127)
            scales[scales == 0] = 1.0
            # A scale that is too small to be a normal number may be too small for the largest.
            weight = np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8)
            packed[:, :SCALE_BYTES] = scales.reshape(-1, PANEL).view(np.int8)
            packed, pairs = packed[:, SCALE_BYTES:], packed.shape[1] - SCALE_BYTES
            packed = packed.reshape(-1, pairs // (2 * PANEL), PANEL, 2)
        else:
            weight = weight.view(np.int16)
        if self.inputs % 2:
            weight = np.pad(weight, ((0, 0), (0, 1)))
        packed[:] = weight.reshape(-1, PANEL, packed.shape[1], 2).transpose(0, 2, 1, 3)
