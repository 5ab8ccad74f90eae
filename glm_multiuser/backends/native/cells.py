"""The cells of a model, each one operator of the library.

All of them compute in float32. Only the first `batch["used"]` rows are read and written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.native import operators
from glm_multiuser.backends.native.packing import TILE, Packing
from glm_multiuser.backends.protocol import AttentionShape
from glm_multiuser.models.batch import RaggedBatch


def ones(size: int, name: str) -> Parameter:
    return Parameter(Tensor(np.ones(size, np.float32)), name=name)


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32))


class Linear(nn.Cell):
    """A product with a packed weight; `inputs` is the type that x is rounded to."""

    def __init__(
        self, packing: Packing, bias: bool, gelu: bool, residual_factor: float, inputs: str
    ) -> None:
        super().__init__()
        self.packing = packing
        self.weight = Parameter(Tensor(packing.zeros()), name="weight")
        self.has_bias = bias
        self.no_bias = zeros(packing.outputs)
        if bias:
            self.bias = Parameter(zeros(packing.outputs), name="bias")
        self.residual_factor = Tensor([residual_factor], ms.float32)
        rounding = "" if inputs == "float32" else f"_{inputs}"
        self.product = operators.linear(("linear_gelu" if gelu else "linear") + rounding)
        self.sum = operators.linear("linear_add" + rounding)

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        bias = self.bias if self.has_bias else self.no_bias
        if residual is None:
            return self.product(x, batch["used"], self.weight, bias)
        return self.sum(x, batch["used"], self.weight, bias, residual, self.residual_factor)


class Embedding(nn.Cell):
    """Rows of a packed table."""

    def __init__(self, packing: Packing, name: str) -> None:
        super().__init__()
        self.packing = packing
        self.name_of_table = name
        setattr(self, name, Parameter(Tensor(packing.zeros()), name=name))
        self.rows = operators.embedding(packing.inputs)
        self.sizes = Tensor([packing.outputs, packing.inputs], ms.int32)

    def construct(self, input_ids: Tensor, batch: RaggedBatch) -> Tensor:
        return self.rows(input_ids, batch["used"], getattr(self, self.name_of_table), self.sizes)


class LayerNorm(nn.Cell):
    """Layer norm (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.gamma, self.beta = ones(size, "gamma"), Parameter(zeros(size), name="beta")
        self.epsilon = Tensor([epsilon], ms.float32)
        self.norm, self.norm_add = operators.layer_norm(), operators.layer_norm()

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        if residual is None:
            return self.norm(x, batch["used"], self.gamma, self.beta, self.epsilon)
        return self.norm_add(x, batch["used"], self.gamma, self.beta, self.epsilon, residual)


class RMSNorm(nn.Cell):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = ones(size, "weight")
        self.epsilon = Tensor([epsilon], ms.float32)
        self.norm, self.norm_add = operators.rms_norm(), operators.rms_norm()

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        if residual is None:
            return self.norm(x, batch["used"], self.weight, self.epsilon)
        return self.norm_add(x, batch["used"], self.weight, self.epsilon, residual)


class EntryNorm(nn.Cell):
    """Layer norm in front of a layer that not every row may be in (`LayerwisePrefill`)."""

    def __init__(self, size: int, epsilon: float, layer: int) -> None:
        super().__init__()
        self.gamma, self.beta = ones(size, "gamma"), Parameter(zeros(size), name="beta")
        self.epsilon = Tensor([epsilon], ms.float32)
        self.layer = Tensor([layer], ms.int32)
        self.norm = operators.layer_norm_of_layer()

    def construct(self, x: Tensor, batch: RaggedBatch) -> tuple[Tensor, RaggedBatch]:
        layerwise = batch["layerwise"]
        normed, used = self.norm(
            x,
            layerwise["plan"],
            self.layer,
            layerwise["saved"],
            self.gamma,
            self.beta,
            self.epsilon,
        )
        inside: RaggedBatch = {
            "users": batch["users"],
            "positions": batch["positions"],
            "used": used,
            "rotary_positions": batch["rotary_positions"],
            "cosine": batch["cosine"],
            "sine": batch["sine"],
            "partner": batch["partner"],
            "layerwise": layerwise,
        }
        return normed, inside


class QueryKeyNorm(nn.Cell):
    """RMS norm of each head of queries and keys."""

    def __init__(self, shape: AttentionShape, epsilon: float) -> None:
        super().__init__()
        self.query_weight = ones(shape.head_dim, "query_weight")
        self.key_weight = ones(shape.head_dim, "key_weight")
        self.epsilon = Tensor([epsilon], ms.float32)
        self.heads = Tensor([shape.heads, shape.kv_heads], ms.int32)
        self.norm = operators.query_key_norm()

    def construct(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        return self.norm(
            x, batch["used"], self.query_weight, self.key_weight, self.epsilon, self.heads
        )


class SwiGLU(nn.Cell):
    """`silu(gate) * up` (Shazeer 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.product = operators.swiglu()

    def construct(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        return self.product(x, batch["used"])


class NextToken(nn.Cell):
    """The most likely next token of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.best = operators.next_token()

    def construct(
        self, hidden: Tensor, logits: Tensor, batch: RaggedBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, finite = self.best(hidden, logits, batch["used"])
        return tokens, finite, logits


class KVCache(nn.Cell):
    """The keys and values of one or more users.

    Keys are float32 `[users, heads, tiles, head_dim, TILE]`: those of `TILE` positions lie side by
    side, so that their scores are computed side by side. Values are `[users, heads, positions,
    head_dim]`. What lies behind a user's last position is never read, so a slot changes hands as
    it is.
    """

    def __init__(self, users: int, heads: int, positions: int, head_dim: int) -> None:
        super().__init__()
        tiles = math.ceil(positions / TILE)
        keys = zeros(users, heads, tiles, head_dim, TILE)
        values = zeros(users, heads, positions, head_dim)
        self.key_past = Parameter(keys, name="key_past", requires_grad=False)
        self.value_past = Parameter(values, name="value_past", requires_grad=False)


class Attention(nn.Cell):
    """Every row over its own user's keys and values, in one operator.

    The operator takes the Parameters of all cells. How many cells there are changes nothing but
    what compiling costs: a graph with hundreds of Parameters takes minutes.
    """

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        self.settings = Tensor([shape.heads, shape.kv_heads, shape.head_dim], ms.int32)
        self.scale = Tensor([1.0 / math.sqrt(shape.head_dim)], ms.float32)
        self.attention = operators.attention(shape.width)

    def set_layout(self, layout: CellLayout) -> None:
        """Gives every user of `layout` an empty cache; what was cached before is dropped."""
        shape = (self.shape.kv_heads, layout.seq_length, self.shape.head_dim)
        self.kv_past = nn.CellList([KVCache(users, *shape) for users in layout.sizes])

    def construct(self, query_key_value: Tensor, batch: RaggedBatch) -> Tensor:
        past: tuple[Tensor, ...] = ()
        for cell in self.kv_past:
            past = (*past, cell.key_past, cell.value_past)
        return self.attention(
            query_key_value,
            batch["used"],
            batch["users"],
            batch["positions"],
            batch["rotary_positions"],
            batch["cosine"],
            batch["sine"],
            batch["partner"],
            self.settings,
            self.scale,
            *past,
        )


@dataclass(frozen=True)
class NativeBackend:
    """Cells of our own kernels.

    Attributes:
        weight_dtype: of the matrices and the embedding, "float32", "float16", "bfloat16" or "int8".
        rotary_dtype: in which the rotary tables are computed.
        input_dtype: that the inputs of products are rounded to, "float32" or "bfloat16".
    """

    weight_dtype: str = "float32"
    rotary_dtype: str = "float32"
    input_dtype: str = "float32"

    name = "native"
    dtype = "float32"
    layer_norm = LayerNorm
    rms_norm = RMSNorm
    entry_norm = EntryNorm
    query_key_norm = QueryKeyNorm
    swiglu = SwiGLU
    attention = Attention
    next_token = NextToken

    def linear(
        self, inputs: int, outputs: int, bias: bool = True, gelu: bool = False, factor: float = 1.0
    ) -> Linear:
        packing = Packing(self.weight_dtype, outputs, inputs)
        return Linear(packing, bias, gelu, factor, self.input_dtype)

    def embedding(self, vocab_size: int, hidden_size: int, name: str = "weight") -> Embedding:
        return Embedding(Packing(self.weight_dtype, vocab_size, hidden_size), name)
