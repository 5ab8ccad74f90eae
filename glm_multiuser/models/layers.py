"""Building blocks that the models share: numerics, linear layers, norms, activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from glm_multiuser.device import WEIGHT_FIRST_ROWS
from glm_multiuser.kernels import operators
from glm_multiuser.kernels.packing import Packing

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
        native: compute with the kernels of `glm_multiuser.kernels`; MindSpore's operators if not.
        weight: type of the matrices, of the embedding too; with native kernels "float32",
            "bfloat16" or "int8", otherwise the compute type.
    """

    compute: str = "float32"
    rotary: str = "float32"
    softmax: str = "float32"
    weight_first_rows: int = WEIGHT_FIRST_ROWS["CPU"]
    native: bool = False
    weight: str = "float32"

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


def weight_matrix(
    outputs: int, inputs: int, numerics: Numerics
) -> tuple[Parameter, Optional[Packing]]:
    """A weight of zeros [outputs, inputs], and how it is packed if it is."""
    if not numerics.native:
        return Parameter(zeros(outputs, inputs, dtype=numerics.compute_type), name="weight"), None
    packing = Packing(numerics.weight, outputs, inputs)
    return Parameter(Tensor(packing.zeros()), name="weight"), packing


class Linear(nn.Cell):
    """`x @ weight.T + bias` for rows `x` [rows, in_features] -> [rows, out_features].

    The weight is stored `[out_features, in_features]`. A product of few rows is computed as
    `weight @ x.T` and turned round: MindSpore's CPU kernels repack their second operand for every
    product, which better be the small one. Native kernels pack the weight once, when it is loaded.

    Args:
        gelu: what comes out goes through a `TanhGelu`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        numerics: Numerics,
        has_bias: bool = True,
        gelu: bool = False,
    ) -> None:
        super().__init__()
        dtype = numerics.compute_type
        self.in_features, self.native = in_features, numerics.native
        self.weight, self.packing = weight_matrix(out_features, in_features, numerics)
        self.has_bias, self.has_gelu = has_bias, gelu
        if has_bias:
            self.bias = Parameter(zeros(out_features, dtype=dtype), name="bias")
        if self.native:
            self.no_bias = zeros(out_features, dtype=dtype)
            self.product = operators.linear("linear_gelu" if gelu else "linear")
            self.sum = operators.linear("linear_add")
            return
        self.weight_first_rows = numerics.weight_first_rows
        self.matmul = ops.MatMul(transpose_b=True)
        self.transpose = ops.Transpose()
        if gelu:
            self.gelu = TanhGelu()

    def construct(
        self,
        x: Tensor,
        used: Any = None,
        residual: Any = None,
        factor: Any = None,
    ) -> Tensor:
        """With `residual` [rows, out_features], that times `factor` is added.

        `used` is for native kernels: int32 [1], how many rows there are. For them `factor` is
        float32 [1]; otherwise it is a number, or None for 1.
        """
        if self.native:
            bias = self.bias if self.has_bias else self.no_bias
            if residual is None:
                return self.product(x, used, self.weight, bias)
            return self.sum(x, used, self.weight, bias, residual, factor)
        if x.shape[0] <= self.weight_first_rows:
            y = self.transpose(self.matmul(self.weight, x), (1, 0))
        else:
            y = self.matmul(x, self.weight)
        if self.has_bias:
            y = y + self.bias
        if self.has_gelu:
            y = self.gelu(y)
        if residual is None:
            return y
        return residual + y if factor is None else residual * factor + y


class Embedding(nn.Cell):
    """Token ids [rows] -> rows of a table [vocab_size, hidden_size].

    `name` is what the published model calls the table.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, numerics: Numerics, name: str = "weight"
    ) -> None:
        super().__init__()
        self.native = numerics.native
        self.name_of_table = name
        table, self.packing = weight_matrix(vocab_size, hidden_size, numerics)
        setattr(self, name, table)
        self.gather = ops.Gather()
        if self.native:
            self.rows = operators.embedding(hidden_size)
            self.sizes = Tensor([vocab_size, hidden_size], ms.int32)

    def construct(self, input_ids: Tensor, used: Any = None) -> Tensor:
        table = getattr(self, self.name_of_table)
        if self.native:
            return self.rows(input_ids, used, table, self.sizes)
        return self.gather(table, input_ids, 0)


class LayerNorm(nn.Cell):
    """Layer norm over the last axis, computed in the softmax type whatever the compute type."""

    def __init__(self, size: int, epsilon: float, numerics: Numerics) -> None:
        super().__init__()
        self.gamma = Parameter(Tensor(np.ones(size, np.float32)), name="gamma")
        self.beta = Parameter(Tensor(np.zeros(size, np.float32)), name="beta")
        self.native = numerics.native
        if self.native:
            self.rows, self.epsilon = operators.layer_norm(), Tensor([epsilon], ms.float32)
            self.rows_of_layer = operators.layer_norm_of_layer()
        self.norm = ops.LayerNorm(begin_norm_axis=1, begin_params_axis=1, epsilon=epsilon)
        self.softmax_type = numerics.softmax_type
        self.compute_type = numerics.compute_type

    def construct(self, x: Tensor, used: Any = None) -> Tensor:
        if self.native:
            return self.rows(x, used, self.gamma, self.beta, self.epsilon)
        y, _, _ = self.norm(ops.cast(x, self.softmax_type), self.gamma, self.beta)
        return ops.cast(y, self.compute_type)

    def at_layer(
        self, x: Tensor, plan: Tensor, layer: Tensor, saved: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The norm in front of a layer that not every row may be in, by native kernels.

        Args:
            x: `[rows, size]`.
            plan: int32 [4]: how many rows there are; how many of them, from the first on, are in
                every layer; the others are in the layers from the third number up to the fourth.
            layer: int32 [1], the number of this one; the final norm counts as the last layer.
            saved: `[*, size]`, a Parameter in which the others wait between two steps.

        Returns:
            `[rows, size]`, and how many rows are in this layer, int32 [1].
        """
        normed, used = self.rows_of_layer(
            x, plan, layer, saved, self.gamma, self.beta, self.epsilon
        )
        return normed, used


class RMSNorm(nn.Cell):
    """Root mean square norm (Zhang and Sennrich 2019) over the last axis, in the softmax type."""

    def __init__(self, size: int, epsilon: float, numerics: Numerics) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(size, np.float32)), name="weight")
        self.native = numerics.native
        if self.native:
            self.rows, self.epsilon = operators.rms_norm(), Tensor([epsilon], ms.float32)
        else:
            self.epsilon = epsilon
        self.mean = ops.ReduceMean(keep_dims=True)
        self.rsqrt = ops.Rsqrt()
        self.softmax_type = numerics.softmax_type
        self.compute_type = numerics.compute_type

    def construct(self, x: Tensor, used: Any = None) -> Tensor:
        if self.native:
            return self.rows(x, used, self.weight, self.epsilon)
        x = ops.cast(x, self.softmax_type)
        y = x * self.rsqrt(self.mean(x * x, -1) + self.epsilon) * self.weight
        return ops.cast(y, self.compute_type)


SIGMOID_LEAST = -90.0
"""On CPU one NaN changes how the sigmoid rounds everything else, other users' rows too. A maximum
with this keeps it out; below it the sigmoid is 0 anyway, and the factor beside it is still NaN."""


class SwiGLU(nn.Cell):
    """`silu(gate) * up` (Shazeer 2020), with silu(x) = x * sigmoid(x)."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.native = numerics.native
        if self.native:
            self.of_two, self.of_halves = operators.swiglu(), operators.swiglu_of_halves()
        self.split = ops.Split(axis=1, output_num=2)
        self.sigmoid = ops.Sigmoid()
        self.maximum = ops.Maximum()

    def construct(self, gate: Tensor, up: Any = None, used: Any = None) -> Tensor:
        """`gate` and `up` [rows, size]; without `up` both are in `gate`, [rows, 2 * size]."""
        if self.native:
            if up is None:
                return self.of_halves(gate, gate, used)
            return self.of_two(gate, up, used)
        if up is None:
            gate, up = self.split(gate)
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
