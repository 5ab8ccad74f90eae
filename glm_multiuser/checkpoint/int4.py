"""Block format of AWQ's and GPTQ's weights: groups of inputs, each with a scale and a zero point.

A block is one group of an output: float16 scale, one byte with the zero point (0 to 15), and the
numbers q (0 to 15) in nibbles as in GGUF's Q4_0: the low nibbles are the first half of the
inputs. A value is `q * scale - zero * scale` in float32, which is exact.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from glm_multiuser.checkpoint.gguf.blocks import Bytes, half, nibbles
from glm_multiuser.checkpoint.stored_tensor import Array, BlockType

HEADER = 3
"""Bytes before the numbers."""


SMALLEST_GROUP, LARGEST_GROUP = 32, 128
"""Inputs."""


@cache
def block_type(group: int) -> BlockType:
    """Returns the type with groups of 32 or 128 inputs; always the same object."""
    name = "int4" if group == SMALLEST_GROUP else f"int4_{group}"
    return BlockType(name, group, HEADER + group // 2, partial(dequantise, group=group))


def dequantise(blocks: Bytes, group: int) -> Array:
    """uint8 [blocks, bytes] -> float32 [blocks, group]."""
    numbers, zeros = nibbles(blocks[:, HEADER:], group // 2), blocks[:, 2:3]
    scales = half(blocks, 0)
    values: Array = numbers.astype(np.float32) * scales - zeros.astype(np.float32) * scales
    return values


def make_blocks(numbers: Bytes, zeros: Bytes, scales: Array) -> Bytes:
    """Numbers [blocks, group], zero points and float16 scales [blocks] -> uint8 [blocks, bytes]."""
    low, high = np.split(numbers, 2, axis=1)
    sides = scales.astype("<f2").reshape(-1, 1).view(np.uint8), zeros.reshape(-1, 1)
    blocks: Bytes = np.concatenate([*sides, low | high << np.uint8(4)], axis=1)
    return blocks
