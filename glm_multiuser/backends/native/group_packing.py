"""Packs group-quantised weights; `cpu/group_types.hpp` documents the layout.

Input blocks are those of a file: GGUF as in `checkpoint/gguf/blocks.py`, AWQ and GPTQ as in
`checkpoint/int4.py`. Packed weights take the same memory, except that scales of Q4_K and Q5_K take
8 bits instead of 6, and zero points of AWQ and GPTQ 4 instead of 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from glm_multiuser.backends.native.packing import PANEL, Packing
from glm_multiuser.backends.native.quantising import QUANTISED, quantise
from glm_multiuser.checkpoint import int4
from glm_multiuser.checkpoint.gguf.blocks import (
    Bytes,
    nibbles,
    q5_k_numbers,
    q6_k_numbers,
    scales_and_minima,
)
from glm_multiuser.checkpoint.stored_tensor import Array
from glm_multiuser.errors import ConfigError

PACKED_VALUES = 1 << 20
"""How many weights are packed at a time: with intermediate arrays, they fit into a cache."""


class Parts(NamedTuple):
    """The fields of blocks [blocks, bytes]."""

    heads: Sequence[Bytes]
    """Each [blocks, bytes]: one value per block."""
    scales: Sequence[Bytes]
    """Each [blocks, groups]: one byte per group."""
    quants: Bytes
    """[blocks, inputs], one per byte."""


class GroupType(NamedTuple):
    """See the struct of this name in `cpu/group_types.hpp`."""

    inputs: int
    group: int
    bits: int
    packed_bytes: int
    """Of a block of a panel."""
    parts: Callable[[Bytes], Parts]


def _q8_0(blocks: Bytes) -> Parts:
    return Parts([blocks[:, :2]], [], blocks[:, 2:])


def _q4_0(blocks: Bytes) -> Parts:
    return Parts([blocks[:, :2]], [], nibbles(blocks[:, 2:], 16))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts([blocks[:, :2], blocks[:, 2:4]], [], nibbles(blocks[:, 4:], 16))


def _with_six_bit_scales(blocks: Bytes, quants: Bytes) -> Parts:
    scales = [array.astype(np.uint8) for array in scales_and_minima(blocks[:, 4:16])]
    return Parts([blocks[:, :2], blocks[:, 2:4]], scales, quants)


def _q4_k(blocks: Bytes) -> Parts:
    return _with_six_bit_scales(blocks, nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Parts:
    return _with_six_bit_scales(blocks, q5_k_numbers(blocks))


def _q6_k(blocks: Bytes) -> Parts:
    return Parts([blocks[:, 208:210]], [blocks[:, 192:208]], q6_k_numbers(blocks))


def _int4(blocks: Bytes) -> Parts:
    quants = nibbles(blocks[:, int4.HEADER :], blocks.shape[1] - int4.HEADER)
    return Parts([blocks[:, :2], blocks[:, 2:3]], [], quants)


GROUP_TYPES = {
    "q8_0": GroupType(32, 32, 8, 34 * PANEL, _q8_0),
    "q4_0": GroupType(32, 32, 4, 18 * PANEL, _q4_0),
    "q4_1": GroupType(32, 32, 4, 20 * PANEL, _q4_1),
    "q4_k": GroupType(256, 32, 4, 148 * PANEL, _q4_k),
    "q5_k": GroupType(256, 32, 5, 180 * PANEL, _q5_k),
    "q6_k": GroupType(256, 16, 6, 210 * PANEL, _q6_k),
    "int4": GroupType(32, 32, 4, 18 * PANEL + PANEL // 2, _int4),
    "int4_128": GroupType(128, 128, 4, 66 * PANEL + PANEL // 2, _int4),
}
"""Types by name. Kernels tell them apart by `packed_bytes`, which differ."""


@dataclass(frozen=True)
class GroupPacking:
    """One weight [outputs, inputs] of a type in `GROUP_TYPES`; `inputs` must be whole blocks."""

    dtype: str
    outputs: int
    inputs: int

    @property
    def type(self) -> GroupType:
        return GROUP_TYPES[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the packed array."""
        panels, blocks = math.ceil(self.outputs / PANEL), self.inputs // self.type.inputs
        return panels, blocks, self.type.packed_bytes

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Of the packed array."""
        return np.dtype(np.uint8)

    @property
    def unpacked_dtype(self) -> np.dtype[Any]:
        """The type from which weights are quantised."""
        return np.dtype(np.float32)

    def pack_rows(self, rows: Array, packed: Bytes) -> bool:
        """Packs rows into whole panels.

        Args:
            rows: uint8 [outputs, blocks, bytes], as stored; for types in `QUANTISED` also
                [outputs, inputs] of a floating type, which are quantised.
            packed: the panels to write.

        Returns:
            Whether all weights are finite.
        """
        if len(packed) * PANEL < len(rows):
            raise ValueError(f"{len(rows)} rows do not fit into {list(packed.shape)}")
        finite, step = True, max(1, PACKED_VALUES // (PANEL * self.inputs))
        for first in range(0, len(packed), step):
            blocks = rows[first * PANEL : (first + step) * PANEL]
            if blocks.dtype != np.uint8:
                blocks, good = self._quantised(np.ascontiguousarray(blocks, np.float32))
                finite = finite and good
            missing = -len(blocks) % PANEL
            if missing:
                blocks = np.pad(blocks, ((0, missing), (0, 0), (0, 0)))
            parts = self.type.parts(blocks.reshape(-1, blocks.shape[-1]))
            finite = finite and all(_is_finite(one) for one in parts.heads)
            packed[first : first + step] = self._packed(parts, len(blocks))
        return finite

    def _quantised(self, values: Array) -> tuple[Bytes, bool]:
        """float32 [outputs, inputs] -> blocks, and whether all weights are finite."""
        if self.dtype not in QUANTISED:
            raise ValueError(f"there are no {self.dtype} weights but those of files")
        return quantise(self.dtype, values)

    def _packed(self, parts: Parts, outputs: int) -> Bytes:
        """Interleaves the outputs of whole panels."""
        heads, scales, quants = parts
        count = self.inputs // self.type.inputs
        shape = (outputs // PANEL, PANEL, count)
        head = [_interleave(one.reshape(*shape, 1, -1)) for one in heads]
        if self.dtype.startswith("int4"):
            zeros = head[1]
            head[1] = zeros[..., : PANEL // 2] | zeros[..., PANEL // 2 :] << np.uint8(4)
        groups = [_interleave(one.reshape(*shape, -1, 1)) for one in scales]
        groups += self._words(quants.reshape(*shape, self.type.inputs // self.type.group, -1))
        rest = np.concatenate(groups, axis=-1)
        whole = [*head, rest.reshape(*rest.shape[:2], 1, -1)]
        packed: Bytes = np.concatenate(whole, axis=-1).reshape(shape[0], count, -1)
        return packed

    def _words(self, quants: Bytes) -> list[Bytes]:
        """[panels, PANEL, blocks, groups, inputs of a group] -> words of upper bits, if the type
        has any, and of the lower ones."""
        quads = quants.reshape(*quants.shape[:-1], -1, 4)
        bits = self.type.bits
        if bits == 8:
            return [_interleave_words(quads)]
        lower = quads & np.uint8(15)
        words = [_interleave_words(lower[..., ::2, :] | lower[..., 1::2, :] << np.uint8(4))]
        if bits > 4:
            shifts = np.arange(quads.shape[-2], dtype=np.uint8) * np.uint8(bits - 4)
            upper = (quads >> np.uint8(4)) << shifts[:, None]
            words.insert(0, _interleave_words(np.bitwise_or.reduce(upper, -2, keepdims=True)))
        return words


AnyPacking = Union[Packing, GroupPacking]


def packing_of(dtype: str, outputs: int, inputs: int) -> AnyPacking:
    """The packing of a weight [outputs, inputs] of this type.

    Raises:
        ConfigError: `inputs` are not whole blocks.
    """
    if dtype not in GROUP_TYPES:
        return Packing(dtype, outputs, inputs)
    group = GROUP_TYPES[dtype].inputs
    if inputs % group:
        raise ConfigError(
            f"weight_dtype is {dtype!r}; a matrix [{outputs}, {inputs}] of this model has "
            f"{inputs} inputs, which must be a multiple of {group}"
        )
    return GroupPacking(dtype, outputs, inputs)


def _is_finite(head: Bytes) -> bool:
    """Whether all float16 values [blocks, 2 bytes] are finite; other types always are."""
    return head.shape[1] != 2 or not (head[:, 1] & 0x7C == 0x7C).any()


def _interleave(array: Bytes) -> Bytes:
    """[panels, PANEL, blocks, groups, bytes] -> [panels, blocks, groups, PANEL * bytes]."""
    moved = array.transpose(0, 2, 3, 1, 4)
    return moved.reshape(*moved.shape[:3], -1)


def _interleave_words(words: Bytes) -> Bytes:
    """[panels, PANEL, blocks, groups, words, 4] -> [panels, blocks, groups, words * PANEL * 4]."""
    moved = words.transpose(0, 2, 3, 4, 1, 5)
    return moved.reshape(*moved.shape[:3], -1)
