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

from glm_multiuser.backends.native import library
from glm_multiuser.bfloat16 import BITS

PANEL = 32
SCALE_BYTES = 4 * PANEL
STORED = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.int16,
    "int8": np.int8,
}
"""Type of a weight -> of the array that holds it."""

BLOCK_BYTES = 1 << 23
"""Of float32: what a thread reads and packs at a time."""

TYPES = {np.dtype("f4"): 0, np.dtype("f2"): 1, BITS: 2}
"""Type of an array of weights -> its number in `glm::Weight`, which is that of `STORED`, too."""


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
    def array_dtype(self) -> np.dtype[Any]:
        """Of the packed array."""
        return np.dtype(STORED[self.dtype])

    @property
    def unpacked_dtype(self) -> np.dtype[Any]:
        """Of what `pack_rows` takes without rounding it, except to int8; `bfloat16.BITS` is one."""
        return {"float16": np.dtype(np.float16), "bfloat16": BITS}.get(self.dtype, np.dtype("f4"))

    def zeros(self) -> NDArray[Any]:
        return np.zeros(self.shape, STORED[self.dtype])

    def pack_rows(self, rows: NDArray[Any], packed: NDArray[Any]) -> bool:
        """Packs some outputs, from the first one of a panel on.

        Args:
            rows: [outputs, inputs], float32, float16 or `bfloat16.BITS`; rounded if need be.
            packed: the panels that they fill.

        Returns:
            Whether all numbers are finite, before and after they are rounded.
        """
        if rows.dtype not in TYPES or rows.shape[1] != self.inputs or not rows.flags.c_contiguous:
            raise ValueError(f"cannot pack {rows.dtype} {list(rows.shape)} for {self}")
        if len(packed) * PANEL < len(rows) or not packed.flags.c_contiguous:
            raise ValueError(f"{len(rows)} rows do not fit into {list(packed.shape)}")
        sizes = len(rows), self.inputs
        wanted = list(STORED).index(self.dtype)
        pack = library.open_library().glm_pack
        return bool(pack(TYPES[rows.dtype], wanted, rows.ctypes.data, *sizes, packed.ctypes.data))
