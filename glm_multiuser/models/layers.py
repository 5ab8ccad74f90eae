"""Building blocks that every model of the family shares: numerics, linear layers, rotary tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from glm_multiuser.device import WEIGHT_FIRST_ROWS

NUMPY_TYPES = {ms.float32: np.float32, ms.float16: np.float16}
"""The types that a model computes in, for arrays on the host."""


@dataclass(frozen=True)
class Numerics:
    """Which types a model computes in, and in which form; chosen here and nowhere else.

    Attributes:
        compute: type of weights, activations and caches.
        rotary: type in which rotary angles, cosines and sines are computed. The published
            half-precision model builds its tables in float16; its float32 form in float32.
        softmax: type of softmax and of layer norms.
        weight_first_rows: products of up to so many rows put the weight first.
    """

    compute: str = "float32"
    rotary: str = "float32"
    softmax: str = "float32"
    weight_first_rows: int = WEIGHT_FIRST_ROWS["CPU"]

    @classmethod
    def of(cls, dtype: str, device_target: str = "CPU") -> Numerics:
        """The published numerics for weights of `dtype` ("float32" or "float16")."""
        first = WEIGHT_FIRST_ROWS[device_target]
        return cls(compute=dtype, rotary=dtype, weight_first_rows=first)

    @property
    def compute_type(self) -> ms.dtype.Type:
        return getattr(ms, self.compute)

    @property
    def softmax_type(self) -> ms.dtype.Type:
        return getattr(ms, self.softmax)


def zeros(*shape: int, dtype: ms.dtype.Type) -> Tensor:
    return Tensor(np.zeros(shape, NUMPY_TYPES[dtype]))


class Linear(nn.Cell):
    """`x @ weight.T + bias` for rows `x` [rows, in_features] -> [rows, out_features].

    The weight is stored `[out_features, in_features]`. A product of few rows is computed as
    `weight @ x.T` and turned round: CPU kernels repack their second operand for every product,
    which better be the small one.
    """

    def __init__(
        self, in_features: int, out_features: int, numerics: Numerics, has_bias: bool = True
    ) -> None:
        super().__init__()
        dtype = numerics.compute_type
        self.weight = Parameter(zeros(out_features, in_features, dtype=dtype), name="weight")
        self.has_bias = has_bias
        if has_bias:
            self.bias = Parameter(zeros(out_features, dtype=dtype), name="bias")
        self.weight_first_rows = numerics.weight_first_rows
        self.matmul = ops.MatMul(transpose_b=True)
        self.transpose = ops.Transpose()

    def construct(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.weight_first_rows:
            y = self.transpose(self.matmul(self.weight, x), (1, 0))
        else:
            y = self.matmul(x, self.weight)
        if self.has_bias:
            y = y + self.bias
        return y


class LayerNorm(nn.Cell):
    """Layer norm over the last axis, computed in the softmax type whatever the compute type."""

    def __init__(self, size: int, epsilon: float, numerics: Numerics) -> None:
        super().__init__()
        self.gamma = Parameter(Tensor(np.ones(size, np.float32)), name="gamma")
        self.beta = Parameter(Tensor(np.zeros(size, np.float32)), name="beta")
        self.norm = ops.LayerNorm(begin_norm_axis=1, begin_params_axis=1, epsilon=epsilon)
        self.softmax_type = numerics.softmax_type
        self.compute_type = numerics.compute_type

    def construct(self, x: Tensor) -> Tensor:
        y, _, _ = self.norm(ops.cast(x, self.softmax_type), self.gamma, self.beta)
        return ops.cast(y, self.compute_type)


class TanhGelu(nn.Cell):
    """GELU in its tanh form (Hendrycks and Gimpel 2016), the one that ChatGLM-6B was trained with.

    Written as `x * sigmoid(2 u)`, which equals `0.5 x (1 + tanh(u))`: on CPU the tanh operator is
    off by 1e-4, the fused GELU is several times slower, the sigmoid is neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = ops.Sigmoid()
        self.maximum = ops.Maximum()

    def construct(self, x: Tensor) -> Tensor:
        # On CPU one NaN changes how the sigmoid rounds everything else, other users' rows too.
        # The maximum keeps it out; below -90 the sigmoid is 0 anyway, and x itself is still NaN.
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        return x * self.sigmoid(self.maximum(twice, -90.0))


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
