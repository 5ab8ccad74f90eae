"""Dequantises the block types of GGUF files to float32.

Block layouts follow ggml-common.h. The arithmetic is float32 in the order of ggml-quants.c
(https://github.com/ggml-org/ggml), so the values are bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.checkpoint.stored_tensor import Array, BlockType

Bytes = NDArray[np.uint8]
"""[blocks, bytes]: whole blocks, or the same part of each."""

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""Values of the 16 numbers of IQ4_NL and IQ4_XS; `kvalues_iq4nl` of ggml-common.h."""


def half(blocks: Bytes, begin: int) -> Array:
    """Reads the float16 at byte `begin` of each block, as float32 [blocks, 1]."""
    numbers: Array = np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2")
    return numbers.astype(np.float32)


def nibbles(packed: Bytes, group: int) -> Bytes:
    """Unpacks each `group` bytes to the low nibbles, then the high ones: [blocks, 2 * bytes]."""
    return bits(packed, group, (0, 4), 15)


def bits(packed: Bytes, group: int, shifts: Sequence[int], mask: int) -> Bytes:
    """Unpacks the masked bits of each `group` bytes, for one shift after another."""
    shape = (len(packed), -1, 1, group)
    steps = np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    found: Bytes = (packed.reshape(shape) >> steps) & np.uint8(mask)
    return found.reshape(len(packed), -1)


def scaled(scales: Array, numbers: Array, minima: Optional[Array] = None) -> Array:
    """Multiplies numbers by their groups' scales [blocks, groups], and subtracts the minima."""
    values: Array = scales[..., None] * numbers.reshape(*scales.shape, -1).astype(np.float32)
    if minima is not None:
        values -= minima[..., None]
    return values.reshape(len(values), -1)


def q8_0(blocks: Bytes) -> Array:
    """`d * q`, with signed integers."""
    return half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def q4_0(blocks: Bytes) -> Array:
    """`d * (q - 8)`."""
    numbers = nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8)
    return half(blocks, 0) * numbers.astype(np.float32)


def q4_1(blocks: Bytes) -> Array:
    """`d * q + m`."""
    return half(blocks, 0) * nibbles(blocks[:, 4:], 16).astype(np.float32) + half(blocks, 2)


def fifth_bits(blocks: Bytes, begin: int) -> Bytes:
    """Reads the fifth bits of 32 numbers from the four bytes at `begin`, as 0 or 16."""
    ones = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
    return ones << np.uint8(4)


def q5_0(blocks: Bytes) -> Array:
    """`d * (q - 16)`."""
    numbers = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks, 2)
    return half(blocks, 0) * (numbers.view(np.int8) - np.int8(16)).astype(np.float32)


def q5_1(blocks: Bytes) -> Array:
    """`d * q + m`."""
    numbers = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks, 4)
    return half(blocks, 0) * numbers.astype(np.float32) + half(blocks, 2)


def q2_k(blocks: Bytes) -> Array:
    """`(d * scale) * q - (dmin * minimum)`, 16 groups of 16."""
    scales, numbers = blocks[:, :16], bits(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    factors = half(blocks, 80) * (scales & np.uint8(15)).astype(np.float32)
    minima = half(blocks, 82) * (scales >> np.uint8(4)).astype(np.float32)
    return scaled(factors, numbers, minima)


def q3_k(blocks: Bytes) -> Array:
    """`(d * (scale - 32)) * (q - 4)`, 16 groups of 16."""
    upper = bits(blocks[:, :32], 32, range(8), 1)
    lower = bits(blocks[:, 32:96], 32, (0, 2, 4, 6), 3)
    numbers = (lower | upper << np.uint8(2)).view(np.int8) - np.int8(4)
    low = nibbles(blocks[:, 96:104], 8)
    high = bits(blocks[:, 104:108], 4, (0, 2, 4, 6), 3)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return scaled(half(blocks, 108) * scales.astype(np.float32), numbers)


def scales_and_minima(packed: Bytes) -> tuple[Array, Array]:
    """Unpacks eight 6-bit values each from 12 bytes, float32 [blocks, 8]; `get_scale_min_k4`."""
    scales, minima, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    six, four = np.uint8(63), np.uint8(15)
    later = (rest & four) | (scales >> np.uint8(6) << np.uint8(4))
    lower = (rest >> np.uint8(4)) | (minima >> np.uint8(6) << np.uint8(4))
    return (
        np.concatenate((scales & six, later), 1).astype(np.float32),
        np.concatenate((minima & six, lower), 1).astype(np.float32),
    )


def q4_k(blocks: Bytes) -> Array:
    """`(d * scale) * q - (dmin * minimum)`, 8 groups of 32."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    numbers = nibbles(blocks[:, 16:], 32)
    return scaled(half(blocks, 0) * scales, numbers, half(blocks, 2) * minima)


def q5_k_numbers(blocks: Bytes) -> Bytes:
    """Returns the numbers of Q5_K, 0 to 31."""
    upper = bits(blocks[:, 16:48], 32, range(8), 1)
    return nibbles(blocks[:, 48:], 32) | upper << np.uint8(4)


def q5_k(blocks: Bytes) -> Array:
    """Like Q4_K, with a fifth bit."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    numbers = q5_k_numbers(blocks)
    return scaled(half(blocks, 0) * scales, numbers, half(blocks, 2) * minima)


def q6_k_numbers(blocks: Bytes) -> Bytes:
    """Returns the numbers of Q6_K, 0 to 63."""
    upper = bits(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    return nibbles(blocks[:, :128], 64) | upper << np.uint8(4)


def q6_k(blocks: Bytes) -> Array:
    """`(d * scale) * (q - 32)`, 16 groups of 16."""
    numbers = q6_k_numbers(blocks).view(np.int8) - np.int8(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scaled(half(blocks, 208) * scales, numbers)


def iq4_nl(blocks: Bytes) -> Array:
    """`d * value`, with a table of values."""
    values: Array = half(blocks, 0) * IQ4_VALUES[nibbles(blocks[:, 2:], 16)]
    return values


def iq4_xs(blocks: Bytes) -> Array:
    """`(d * (scale - 32)) * value`, 8 groups of 32."""
    high = bits(blocks[:, 2:4], 1, (0, 2, 4, 6), 3)
    low = bits(blocks[:, 4:8], 1, (0, 4), 15)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    factors = half(blocks, 0) * scales.astype(np.float32)
    return scaled(factors, IQ4_VALUES[nibbles(blocks[:, 8:], 16)])


BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, q4_0),
    3: BlockType("Q4_1", 32, 20, q4_1),
    6: BlockType("Q5_0", 32, 22, q5_0),
    7: BlockType("Q5_1", 32, 24, q5_1),
    8: BlockType("Q8_0", 32, 34, q8_0),
    10: BlockType("Q2_K", 256, 84, q2_k),
    11: BlockType("Q3_K", 256, 110, q3_k),
    12: BlockType("Q4_K", 256, 144, q4_k),
    13: BlockType("Q5_K", 256, 176, q5_k),
    14: BlockType("Q6_K", 256, 210, q6_k),
    20: BlockType("IQ4_NL", 32, 18, iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, iq4_xs),
}
"""Type number in a file -> type."""
