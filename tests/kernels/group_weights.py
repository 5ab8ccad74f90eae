"""Random group-quantised weights, as file blocks, and the values they represent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native.group_packing import GroupPacking
from glm_multiuser.checkpoint import int4
from glm_multiuser.checkpoint.gguf import blocks as gguf
from glm_multiuser.checkpoint.gguf.blocks import BLOCK_TYPES, half, nibbles
from tests.kernels.weights import pack_whole

TYPES = {one.name.lower(): one for one in BLOCK_TYPES.values()}
TYPES |= {"int4": int4.block_type(32), "int4_128": int4.block_type(128)}
"""Name of a packed type -> storage of its blocks, and their values."""

HALVES = {
    **{"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2)},
    **{"q6_k": (208,), "int4": (0,), "int4_128": (0,)},
}
"""Byte offsets of float16 numbers in a block."""

DTYPES = tuple(HALVES)

Split = tuple[NDArray[Any], NDArray[Any], Optional[NDArray[Any]]]


def split(dtype: str, blocks: NDArray[np.uint8]) -> Split:
    """Blocks [blocks, bytes] -> integers [blocks, inputs], and float32 [blocks, groups]: the scale
    of each group, and the offset added afterwards, if any."""
    scale = half(blocks, 0)
    if dtype == "q8_0":
        return blocks[:, 2:].view(np.int8), scale, None
    if dtype == "q4_0":
        return nibbles(blocks[:, 2:], 16).view(np.int8) - 8, scale, None
    if dtype == "q4_1":
        return nibbles(blocks[:, 4:], 16), scale, half(blocks, 2)
    if dtype == "q6_k":
        scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        return gguf.q6_k_numbers(blocks).view(np.int8) - 32, scales, None
    if dtype.startswith("int4"):
        numbers = nibbles(blocks[:, int4.HEADER :], blocks.shape[1] - int4.HEADER)
        return numbers, scale, -scale * blocks[:, 2:3].astype(np.float32)
    scales, minima = gguf.scales_and_minima(blocks[:, 4:16])
    is_q4 = dtype == "q4_k"
    numbers = nibbles(blocks[:, 16:], 32) if is_q4 else gguf.q5_k_numbers(blocks)
    return numbers, scale * scales, -half(blocks, 2) * minima


DELICATE = np.array([0.0, -0.0, 2.0**-24, -(2.0**-15), 65504.0], np.float16)


@dataclass(frozen=True)
class GroupWeight:
    packing: GroupPacking
    blocks: NDArray[np.uint8]

    @staticmethod
    def random(dtype: str, outputs: int, count: int, seed: int = 0) -> GroupWeight:
        """Random bits, but finite scales: usual ones and occasionally edge cases."""
        generator, block_type = np.random.default_rng(seed), TYPES[dtype]
        shape = (outputs, count)
        blocks = generator.integers(0, 256, (*shape, block_type.bytes), np.uint8)
        for at in HALVES[dtype]:
            scales = generator.standard_normal(shape).astype(np.float16)
            delicate = generator.random(shape) < 0.1
            scales[delicate] = generator.choice(DELICATE, delicate.sum())
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        if dtype.startswith("int4"):
            blocks[..., 2] &= 15
        packing = GroupPacking(dtype, outputs, count * block_type.values)
        return GroupWeight(packing, blocks)

    def packed(self) -> NDArray[np.uint8]:
        return pack_whole(self.packing, self.blocks)

    def values(self) -> NDArray[np.float32]:
        """[outputs, inputs]"""
        block_type = TYPES[self.packing.dtype]
        values: NDArray[Any] = block_type.dequantise(self.blocks.reshape(-1, block_type.bytes))
        return values.reshape(self.packing.outputs, self.packing.inputs)

    def numbers_and_scales(self) -> Split:
        """As `split`, [outputs, inputs] and [outputs, groups]."""
        blocks = self.blocks.reshape(-1, self.blocks.shape[-1])
        parts = split(self.packing.dtype, blocks)
        outputs = self.packing.outputs
        numbers, scales = (part.reshape(outputs, -1) for part in parts[:2])
        minima = None if parts[2] is None else parts[2].reshape(outputs, -1)
        return numbers.astype(np.int64), scales, minima
