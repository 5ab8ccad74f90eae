"""Memory layout of packed weights.

A weight [out, in] is split into panels of `PANEL` outputs; the last one is zero-padded. Within a
panel, outputs are interleaved, so that products read memory sequentially:

    float32    [panels, in, PANEL]
    float16    the same
    bfloat16   [panels, in / 2, PANEL, 2]: pairs of inputs, as dot-product instructions take them;
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
"""Type of a weight -> type of its array."""

BLOCK_BYTES = 1 << 23
"""What a thread reads and packs at a time, as float32."""

TYPES = {np.dtype("f4"): 0, np.dtype("f2"): 1, BITS: 2}
"""Type of an array of weights -> its value in `glm::Weight`, which has the order of `STORED`."""


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
    def array_dtype(self) -> np.dtype[Any]:
        """Of the packed array."""
        return np.dtype(STORED[self.dtype])

    @property
    def unpacked_dtype(self) -> np.dtype[Any]:
        """The type that `pack_rows` takes without rounding, except to int8; may be
        `bfloat16.BITS`."""
        return {"float16": np.dtype(np.float16), "bfloat16": BITS}.get(self.dtype, np.dtype("f4"))

    def pack_rows(self, rows: NDArray[Any], packed: NDArray[Any]) -> bool:
        """Packs rows into whole panels.

        Args:
            rows: [outputs, inputs], float32, float16 or `bfloat16.BITS`; rounded if necessary.
            packed: the panels to write.

        Returns:
            Whether all weights are finite, before and after rounding.
        """
        if rows.dtype not in TYPES or rows.shape[1] != self.inputs or not rows.flags.c_contiguous:
            raise ValueError(f"cannot pack {rows.dtype} {list(rows.shape)} for {self}")
        if len(packed) * PANEL < len(rows) or not packed.flags.c_contiguous:
            raise ValueError(f"{len(rows)} rows do not fit into {list(packed.shape)}")
        sizes = len(rows), self.inputs
        wanted = list(STORED).index(self.dtype)
        pack = library.open_library().glm_pack
        return bool(pack(TYPES[rows.dtype], wanted, rows.ctypes.data, *sizes, packed.ctypes.data))
