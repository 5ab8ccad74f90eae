"""Building blocks that the models share: numerics, linear layers, norms, activations."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

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


class Embedding(nn.Cell):
    """Token ids [rows] -> rows of `weight` [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, numerics: Numerics) -> None:
        super().__init__()
        table = zeros(vocab_size, hidden_size, dtype=numerics.compute_type)
        self.weight = Parameter(table, name="weight")
        self.gather = ops.Gather()

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.gather(self.weight, input_ids, 0)


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


class RMSNorm(nn.Cell):
    """Root mean square norm (Zhang and Sennrich 2019) over the last axis, in the softmax type."""

    def __init__(self, size: int, epsilon: float, numerics: Numerics) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")
        self.epsilon = epsilon
        self.mean = ops.ReduceMean(keep_dims=True)
        self.rsqrt = ops.Rsqrt()
        self.softmax_type = numerics.softmax_type
        self.compute_type = numerics.compute_type

    def construct(self, x: Tensor) -> Tensor:
        x = ops.cast(x, self.softmax_type)
        y = x * self.rsqrt(self.mean(x * x, -1) + self.epsilon) * self.weight
        return ops.cast(y, self.compute_type)


SIGMOID_LEAST = -90.0
"""On CPU one NaN changes how the sigmoid rounds everything else, other users' rows too. A maximum
with this keeps it out; below it the sigmoid is 0 anyway, and the factor beside it is still NaN."""


class SwiGLU(nn.Cell):
    """`silu(gate) * up` (Shazeer 2020), with silu(x) = x * sigmoid(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = ops.Sigmoid()
        self.maximum = ops.Maximum()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * self.sigmoid(self.maximum(gate, SIGMOID_LEAST)) * up


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
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        return x * self.sigmoid(self.maximum(twice, SIGMOID_LEAST))
