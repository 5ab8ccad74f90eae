"""Rotary position embeddings (Su et al. 2021, RoFormer)."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from glm_multiuser.config import CausalConfig
from glm_multiuser.models.layers import NUMPY_TYPES, Numerics


def rotary_tables(positions: int, dimensions: int, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and signed sines of the rotary embedding (Su et al. 2021).

    As in the published model, the inverse frequencies are rounded to float16 once, and all
    further arithmetic happens in `dtype`. The first half of each sine row is negated, so that
    rotating is `x * cosine + swap_halves(x) * sine`.

    Args:
        positions: rows of the tables.
        dimensions: size of the rotated vector, even.
        dtype: "float32" or "float16".

    Returns:
        Two float32 arrays `[positions, dimensions]`.
    """
    exponents = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(dimensions)
    inverse_frequency = (1.0 / np.power(np.float32(10000.0), exponents)).astype(np.float16)
    angles = np.outer(np.arange(positions).astype(dtype), inverse_frequency.astype(dtype)).astype(
        dtype
    )
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return np.concatenate((cosine, cosine), 1), np.concatenate((-sine, sine), 1)


class RotaryEmbedding2D(nn.Cell):
    """ChatGLM-6B's two-dimensional rotary embedding.

    The first half of each head turns with the position in the context, the second half with the
    position in the answer (Du et al. 2022, GLM; `RotaryEmbedding` of the published model).
    """

    def __init__(self, head_dim: int, positions: int, numerics: Numerics) -> None:
        super().__init__()
        cosine, sine = rotary_tables(positions, head_dim // 2, numerics.rotary)
        quarters = np.arange(head_dim, dtype=np.int32).reshape(4, -1)
        self.partner = Tensor(quarters[[1, 0, 3, 2]].reshape(-1))
        self.cosine = Tensor(cosine, numerics.compute_type)
        self.sine = Tensor(sine, numerics.compute_type)
        self.gather = ops.Gather()
        self.split = ops.Split(axis=2, output_num=4)

    def tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for `position_ids` [2, rows] -> cosine, sine `[rows, 1, head_dim]`."""
        rows = position_ids.shape[1]
        cosine = ops.concat(
            (
                self.gather(self.cosine, position_ids[0], 0),
                self.gather(self.cosine, position_ids[1], 0),
            ),
            1,
        )
        sine = ops.concat(
            (
                self.gather(self.sine, position_ids[0], 0),
                self.gather(self.sine, position_ids[1], 0),
            ),
            1,
        )
        return cosine.reshape(rows, 1, -1), sine.reshape(rows, 1, -1)

    def construct(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotates `x` [rows, heads, head_dim] by tables `[rows, 1, head_dim]`."""
        first, second, third, fourth = self.split(x)
        return x * cosine + ops.concat((second, first, fourth, third), 2) * sine


TABLE_ROWS = 2048
"""Positions that the tables of a causal model have at least."""


def causal_tables(config: CausalConfig, positions: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cosines and sines of a causal model, computed in float32.

    The first `rotary_dim` numbers of a head turn, pair by pair; for the others the cosine is 1
    and the sine 0. ChatGLM turns neighbours, 0 with 1 and so on (`apply_rotary_pos_emb` of
    THUDM/chatglm3-6b); Qwen2 turns number i of the first half with number i of the second
    (`rotate_half` of transformers).

    Args:
        config: of the model.
        positions: rows of the tables.

    Returns:
        Two float32 arrays `[positions, head_dim]`.
    """
    dimensions, rest = config.rotary_dim, config.head_dim - config.rotary_dim
    exponents = np.arange(0, dimensions, 2, dtype=np.float32) / np.float32(dimensions)
    inverse_frequency = (1.0 / np.power(np.float32(config.rope_theta), exponents)).astype("f4")
    angles = np.outer(np.arange(positions, dtype=np.float32), inverse_frequency)
    of_pairs = np.arange(dimensions) // 2
    of_halves = np.arange(dimensions) % (dimensions // 2)
    angles = angles[:, of_pairs if config.rotary_interleaved else of_halves]
    cosine = np.pad(np.cos(angles), ((0, 0), (0, rest)), constant_values=1.0)
    return cosine, np.pad(np.sin(angles), ((0, 0), (0, rest)))


def partners(config: CausalConfig) -> NDArray[Any]:
    """float32 [head_dim, head_dim]: `x @ partners` has at each number's place what it turns with.

    The first of a pair gets the negative of the second, the second gets the first.
    """
    half, dimensions = config.rotary_dim // 2, config.rotary_dim
    if config.rotary_interleaved:
        first, second = np.arange(0, dimensions, 2), np.arange(1, dimensions, 2)
    else:
        first, second = np.arange(half), np.arange(half, dimensions)
    matrix = np.zeros((config.head_dim, config.head_dim), np.float32)
    matrix[second, first] = -1.0
    matrix[first, second] = 1.0
    return matrix


class RotaryEmbedding(nn.Cell):
    """The rotary embedding of the causal families.

    Numbers meet their partners by a product with a matrix of 0, 1 and -1: it is exact, and
    needs no operator that takes every second number out.
    """

    def __init__(self, config: CausalConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config = config
        dtype = NUMPY_TYPES[numerics.compute_type]
        self.dtype = dtype
        self.head_dim = config.head_dim
        matrix = partners(config)
        self.partners = Tensor(matrix.astype(dtype))
        # Where nothing turns, the sine is 0 and the partner may be any.
        self.partner = Tensor(np.abs(matrix).argmax(axis=0).astype(np.int32))
        self.signs = matrix.sum(axis=0) if numerics.native else np.ones(config.head_dim, np.float32)
        self.matmul = ops.MatMul()
        self.gather = ops.Gather()
        self.set_positions(min(TABLE_ROWS, config.max_sequence_length))

    def set_positions(self, positions: int) -> None:
        """Makes the tables long enough; graphs of shorter ones must not be used again."""
        cosine, sine = causal_tables(self.config, positions)
        self.positions = positions
        self.cosine = Tensor(cosine.astype(self.dtype))
        # Native kernels know which number is whose partner, and take the sign from the sine.
        self.sine = Tensor((sine * self.signs).astype(self.dtype))

    def tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for `position_ids` [rows] -> cosine, sine `[rows, 1, head_dim]`."""
        rows = position_ids.shape[0]
        cosine = self.gather(self.cosine, position_ids, 0)
        sine = self.gather(self.sine, position_ids, 0)
        return cosine.reshape(rows, 1, -1), sine.reshape(rows, 1, -1)

    def construct(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotates `x` [rows, heads, head_dim] by tables `[rows, 1, head_dim]`."""
        partner = self.matmul(x.reshape(-1, self.head_dim), self.partners)
        return x * cosine + partner.reshape(x.shape) * sine
