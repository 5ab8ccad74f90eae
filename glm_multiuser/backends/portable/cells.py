"""The cells of a model, made of operators that MindSpore has for every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from glm_multiuser.backends.portable.attention import Attention
from glm_multiuser.backends.portable.types import tensor_type, zeros
from glm_multiuser.backends.protocol import AttentionShape, inner_columns
from glm_multiuser.device import WEIGHT_FIRST_ROWS
from glm_multiuser.models.batch import PaddedBatch


@dataclass(frozen=True)
class PortableBackend:
    """Cells made of MindSpore's operators.

    Attributes:
        dtype: of weights, activations and caches.
        rotary_dtype: in which rotary angles, cosines and sines are computed. The published
            half-precision model builds its tables in float16; its float32 form in float32.
        softmax_dtype: of softmax and norms.
        weight_first_rows: products of up to this many rows put the weight first.
    """

    dtype: str = "float32"
    rotary_dtype: str = "float32"
    softmax_dtype: str = "float32"
    weight_first_rows: int = WEIGHT_FIRST_ROWS["CPU"]

    name = "portable"

    @classmethod
    def of(cls, dtype: str, device_target: str = "CPU") -> PortableBackend:
        """The published numerics for weights of `dtype` ("float32" or "float16")."""
        return cls(dtype, dtype, weight_first_rows=WEIGHT_FIRST_ROWS[device_target])

    @property
    def weight_dtype(self) -> str:
        return self.dtype

    @property
    def cache_dtype(self) -> str:
        return self.dtype

    @property
    def kept_as(self) -> str:
        return self.dtype

    def set_weight_types(self, model: nn.Cell) -> None:
        """Nothing: all matrices have one type."""

    def linear(self, inputs: int, outputs: int, bias: bool = True, factor: float = 1.0) -> Linear:
        return Linear(inputs, outputs, bias, factor, self)

    def mlp(
        self, hidden: int, inner: int, activation: str, bias: bool = True, factor: float = 1.0
    ) -> MLP:
        up = self.linear(hidden, inner_columns(activation, inner), bias)
        return MLP(up, self.linear(inner, hidden, bias, factor), ACTIVATIONS[activation]())

    def embedding(self, vocab_size: int, hidden_size: int, name: str = "weight") -> Embedding:
        return Embedding(vocab_size, hidden_size, name, self.dtype)

    def layer_norm(self, size: int, epsilon: float) -> LayerNorm:
        return LayerNorm(size, epsilon, self)

    def rms_norm(self, size: int, epsilon: float) -> RMSNorm:
        return RMSNorm(size, epsilon, self)

    def entry_norm(self, size: int, epsilon: float, layer: int) -> EntryNorm:
        return EntryNorm(size, epsilon, self)

    def query_key_norm(self, shape: AttentionShape, epsilon: float) -> QueryKeyNorm:
        return QueryKeyNorm(shape, epsilon, self)

    def attention(self, shape: AttentionShape) -> Attention:
        return Attention(shape, self.dtype, self.softmax_dtype)

    def next_token(self) -> NextToken:
        return NextToken(self.softmax_dtype)


def ones(size: int, name: str) -> Parameter:
    return Parameter(Tensor(np.ones(size, np.float32)), name=name)


class Linear(nn.Cell):
    """`x @ weight.T + bias`, with the weight stored `[outputs, inputs]`.

    A product of few rows is computed as `weight @ x.T` and transposed: MindSpore's CPU kernels
    repack their second operand for every product, so the small one should be the second.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        residual_factor: float,
        backend: PortableBackend,
    ) -> None:
        super().__init__()
        dtype = backend.dtype
        self.weight = Parameter(zeros(outputs, inputs, dtype=dtype), name="weight")
        self.has_bias = bias
        if bias:
            self.bias = Parameter(zeros(outputs, dtype=dtype), name="bias")
        self.residual_factor = residual_factor
        self.weight_first_rows = backend.weight_first_rows
        self.matmul = ops.MatMul(transpose_b=True)
        self.transpose = ops.Transpose()

    def construct(self, x: Tensor, batch: PaddedBatch, residual: Optional[Tensor] = None) -> Tensor:
        if x.shape[0] <= self.weight_first_rows:
            y = self.transpose(self.matmul(self.weight, x), (1, 0))
        else:
            y = self.matmul(x, self.weight)
        if self.has_bias:
            y = y + self.bias
        if residual is None:
            return y
        return residual + y if self.residual_factor == 1.0 else residual * self.residual_factor + y


class Embedding(nn.Cell):
    """Rows of a table."""

    def __init__(self, vocab_size: int, hidden_size: int, name: str, dtype: str) -> None:
        super().__init__()
        self.name_of_table = name
        setattr(self, name, Parameter(zeros(vocab_size, hidden_size, dtype=dtype), name=name))
        self.gather = ops.Gather()

    def construct(self, input_ids: Tensor, batch: PaddedBatch) -> Tensor:
        return self.gather(getattr(self, self.name_of_table), input_ids, 0)


class LayerNormBase(nn.Cell):
    """Layer norm (Ba et al. 2016), computed in the softmax type whatever the compute type."""

    def __init__(self, size: int, epsilon: float, backend: PortableBackend) -> None:
        super().__init__()
        self.gamma = ones(size, "gamma")
        self.beta = Parameter(Tensor(np.zeros(size, np.float32)), name="beta")
        self.norm = ops.LayerNorm(begin_norm_axis=1, begin_params_axis=1, epsilon=epsilon)
        self.softmax_type = tensor_type(backend.softmax_dtype)
        self.compute_type = tensor_type(backend.dtype)

    def normed(self, x: Tensor) -> Tensor:
        y, _, _ = self.norm(ops.cast(x, self.softmax_type), self.gamma, self.beta)
        return ops.cast(y, self.compute_type)


class LayerNorm(LayerNormBase):
    """Layer norm, with an optional residual."""

    def construct(self, x: Tensor, batch: PaddedBatch, residual: Optional[Tensor] = None) -> Tensor:
        y = self.normed(x)
        return y if residual is None else residual + y


class EntryNorm(LayerNormBase):
    """Layer norm before a layer; in a padded batch, all rows go through every layer."""

    def construct(self, x: Tensor, batch: PaddedBatch) -> tuple[Tensor, PaddedBatch]:
        return self.normed(x), batch


class RMSNorm(nn.Cell):
    """Root mean square norm (Zhang and Sennrich 2019), computed in the softmax type."""

    def __init__(self, size: int, epsilon: float, backend: PortableBackend) -> None:
        super().__init__()
        self.weight = ones(size, "weight")
        self.normed = RMSNormed(epsilon, backend)

    def construct(self, x: Tensor, batch: PaddedBatch, residual: Optional[Tensor] = None) -> Tensor:
        y = self.normed(x, self.weight)
        return y if residual is None else residual + y


class RMSNormed(nn.Cell):
    """`x / sqrt(mean(x ** 2) + epsilon) * weight` over the last axis."""

    def __init__(self, epsilon: float, backend: PortableBackend) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.rsqrt = ops.Rsqrt()
        self.softmax_type = tensor_type(backend.softmax_dtype)
        self.compute_type = tensor_type(backend.dtype)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        x = ops.cast(x, self.softmax_type)
        y = x * self.rsqrt(mint.mean(x * x, -1, True) + self.epsilon) * weight
        return ops.cast(y, self.compute_type)


class QueryKeyNorm(nn.Cell):
    """RMS norm of each head of queries and keys."""

    def __init__(self, shape: AttentionShape, epsilon: float, backend: PortableBackend) -> None:
        super().__init__()
        self.query_weight = ones(shape.head_dim, "query_weight")
        self.key_weight = ones(shape.head_dim, "key_weight")
        self.head_dim, self.width, self.kv_width = shape.head_dim, shape.width, shape.kv_width
        self.normed = RMSNormed(epsilon, backend)

    def construct(self, x: Tensor, batch: PaddedBatch) -> Tensor:
        rows, keys_end = x.shape[0], self.width + self.kv_width
        query = x[:, : self.width].reshape(rows, -1, self.head_dim)
        key = x[:, self.width : keys_end].reshape(rows, -1, self.head_dim)
        query = self.normed(query, self.query_weight).reshape(rows, -1)
        key = self.normed(key, self.key_weight).reshape(rows, -1)
        return ops.concat((query, key, x[:, keys_end:]), 1)


SIGMOID_LEAST = -90.0
"""On CPU, one NaN changes how the sigmoid rounds everything else, including other users' rows. A
maximum with this removes it: below, the sigmoid is 0 anyway, and the other factor is still NaN."""


class SwiGLU(nn.Cell):
    """`silu(gate) * up` (Shazeer 2020), with silu(x) = x * sigmoid(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.split = ops.Split(axis=1, output_num=2)
        self.sigmoid = ops.Sigmoid()
        self.maximum = ops.Maximum()

    def construct(self, x: Tensor) -> Tensor:
        gate, up = self.split(x)
        return gate * self.sigmoid(self.maximum(gate, SIGMOID_LEAST)) * up


class TanhGelu(nn.Cell):
    """GELU with the tanh approximation (Hendrycks and Gimpel 2016), as ChatGLM-6B was trained.

    Computed as `x * sigmoid(2 u)`, which equals `0.5 x (1 + tanh(u))`: on CPU, the tanh operator
    has an error of 1e-4, and the fused GELU is several times slower than the sigmoid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = ops.Sigmoid()
        self.maximum = ops.Maximum()

    def construct(self, x: Tensor) -> Tensor:
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        return x * self.sigmoid(self.maximum(twice, SIGMOID_LEAST))


ACTIVATIONS = {"gelu": TanhGelu, "swiglu": SwiGLU}


class MLP(nn.Cell):
    """hidden -> inner -> hidden."""

    def __init__(self, up: Linear, down: Linear, activation: nn.Cell) -> None:
        super().__init__()
        self.dense_h_to_4h, self.activation, self.dense_4h_to_h = up, activation, down

    def construct(self, x: Tensor, batch: PaddedBatch, residual: Optional[Tensor] = None) -> Tensor:
        inner = self.activation(self.dense_h_to_4h(x, batch))
        return self.dense_4h_to_h(inner, batch, residual)


class NextToken(nn.Cell):
    """The most likely next token of each row."""

    def __init__(self, softmax_dtype: str) -> None:
        super().__init__()
        self.softmax_type = tensor_type(softmax_dtype)
        self.argmax = ops.Argmax(axis=-1, output_type=ms.int32)

    def construct(
        self, hidden: Tensor, logits: Tensor, batch: PaddedBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = ops.cast(logits, self.softmax_type)
        tokens = self.argmax(logits)
        best = ops.gather_d(logits, 1, tokens.reshape(-1, 1))
        finite = ops.sum(hidden * 0, 1) + best.reshape(-1) * 0
        return tokens, finite, logits
