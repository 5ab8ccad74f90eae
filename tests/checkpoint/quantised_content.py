"""Matrices as AWQ and GPTQ write them, packed number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order_map: which of eight outputs is in the lowest 4 bits of a word, and so on."""


@dataclass
class Quantised:
    """q [outputs, inputs] and zero [outputs, groups], 0 to 15; scale float16 [outputs, groups]."""

    q: NDArray[np.int64]
    zero: NDArray[np.int64]
    scale: NDArray[np.float16]

    @staticmethod
    def random(outputs: int, inputs: int, group: int, seed: int = 0) -> Quantised:
        generator = np.random.default_rng(seed)
        shape = (outputs, inputs // group)
        scale = generator.uniform(0.002, 0.03, shape).astype(np.float16)
        q, zero = generator.integers(0, 16, (outputs, inputs)), generator.integers(0, 16, shape)
        return Quantised(q, zero, scale)

    def values(self) -> NDArray[np.float32]:
        """[outputs, inputs]"""
        repeated = self.q.shape[1] // self.scale.shape[1]
        scale = np.repeat(self.scale.astype(np.float32), repeated, axis=1)
        return (self.q - np.repeat(self.zero, repeated, axis=1)).astype(np.float32) * scale

    def tensors(self, method: str) -> dict[str, NDArray[Any]]:
        """The parts of a matrix, by the last word of their names; of "awq", "gptq" or "gptq_v2"."""
        scales = np.ascontiguousarray(self.scale.T)
        if method == "awq":
            packed = words(self.q.T, AWQ_OUTPUTS), words(self.zero.T, AWQ_OUTPUTS)
            return {"qweight": packed[0], "qzeros": packed[1], "scales": scales}
        in_order = range(8)
        zeros = words(self.zero.T, in_order)
        if method == "gptq":  # as `convert_gptq_v2_to_v1_format` of AutoGPTQ and GPTQModel
            zeros = (zeros.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        inputs, groups = self.q.shape[1], self.scale.shape[1]
        return {
            "qweight": np.ascontiguousarray(words(self.q, in_order).T),
            "qzeros": zeros,
            "scales": scales,
            "g_idx": (np.arange(inputs) // (inputs // groups)).astype(np.int32),
        }


def words(numbers: NDArray[np.int64], order: Any) -> NDArray[np.int32]:
    """[rows, columns] -> [rows, columns / 8], 8 columns to a word: the lowest bits first."""
    packed = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for row in range(packed.shape[0]):
        for column in range(packed.shape[1]):
            word = 0
            for place, number in enumerate(order):
                word |= int(numbers[row, 8 * column + number]) << (4 * place)
            packed[row, column] = word
    return packed.view(np.int32)


def quantisation_config(method: str, group: int, **changes: Any) -> dict[str, Any]:
    """As the published tools write it."""
    found: dict[str, Any] = {"bits": 4, "group_size": group, "quant_method": method}
    if method == "awq":
        found |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    else:
        found |= {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    return {**found, **changes}
