"""The cells of a model, each one instruction of a step's program (`program.py`).

Activations are float32. Only the first `batch["used"]` rows are read and written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.native import library, operators
from glm_multiuser.backends.native.group_packing import AnyPacking, packing_of
from glm_multiuser.backends.native.kv_layout import (
    STORED,
    cache_shapes,
    capacity,
    head_sizes,
)
from glm_multiuser.backends.native.pages import PagedArray
from glm_multiuser.backends.native.weight_types import described
from glm_multiuser.backends.protocol import AttentionShape, inner_columns
from glm_multiuser.mindspore_internals import parameter_of, zero_parameter
from glm_multiuser.models.batch import RaggedBatch


def ones(size: int, name: str) -> Parameter:
    return Parameter(Tensor(np.ones(size, np.float32)), name=name)


def zeros(size: int, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros(size, np.float32)), name=name)


def float_constants(*numbers: float) -> NDArray[np.float32]:
    return np.array(numbers, np.float32)


def int_constants(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


class Linear(nn.Cell):
    """A product with a packed weight; `inputs` is the type that x is rounded to."""

    def __init__(
        self, packing: AnyPacking, bias: bool, residual_factor: float, inputs: str
    ) -> None:
        super().__init__()
        self.packing = packing
        self.weight = zero_parameter(packing.shape, packing.array_dtype, "weight")
        # The kernels always take a bias; without one it is a constant of the program.
        no_bias = np.zeros(packing.outputs, np.float32)
        self.bias = zeros(packing.outputs, "bias") if bias else no_bias
        self.residual_factor = float_constants(residual_factor)
        self.inputs = inputs
        self.rounding = "" if inputs == "float32" else f"_{inputs}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x that is packed for this product."""
        packing = self.packing
        dtype = np.dtype(packing.array_dtype).name
        return library.row_bytes(dtype, packing.shape, packing.inputs, self.inputs)

    @property
    def operands(self) -> tuple[Any, Any]:
        """Weight and bias."""
        return self.weight, self.bias

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        if residual is None:
            return operators.linear("linear" + self.rounding)(x, batch["used"], *self.operands)
        product = operators.linear("linear_add" + self.rounding)
        return product(x, batch["used"], *self.operands, residual, self.residual_factor)


class Embedding(nn.Cell):
    """Rows of a packed table."""

    def __init__(self, packing: AnyPacking, name: str) -> None:
        super().__init__()
        self.packing = packing
        self.name_of_table = name
        setattr(self, name, zero_parameter(packing.shape, packing.array_dtype, name))
        self.rows = operators.embedding(packing.inputs)
        self.sizes = int_constants(packing.outputs, packing.inputs)

    def construct(self, input_ids: Tensor, batch: RaggedBatch) -> Tensor:
        return self.rows(input_ids, batch["used"], getattr(self, self.name_of_table), self.sizes)


class LayerNorm(nn.Cell):
    """Layer norm (Ba et al. 2016)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.gamma, self.beta = ones(size, "gamma"), zeros(size, "beta")
        self.epsilon = float_constants(epsilon)

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        added = () if residual is None else (residual,)
        return operators.layer_norm(x, batch["used"], self.gamma, self.beta, self.epsilon, *added)


class RMSNorm(nn.Cell):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = ones(size, "weight")
        self.epsilon = float_constants(epsilon)

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        added = () if residual is None else (residual,)
        return operators.rms_norm(x, batch["used"], self.weight, self.epsilon, *added)


class EntryNorm(nn.Cell):
    """Layer norm before a layer that only some of the rows may go through (`LayerwisePrefill`)."""

    def __init__(self, size: int, epsilon: float, layer: int) -> None:
        super().__init__()
        self.gamma, self.beta = ones(size, "gamma"), zeros(size, "beta")
        self.epsilon = float_constants(epsilon)
        self.layer = int_constants(layer)

    def construct(self, x: Tensor, batch: RaggedBatch) -> tuple[Tensor, RaggedBatch]:
        layerwise = batch["layerwise"]
        normed, used = operators.layer_norm_of_layer(
            x,
            layerwise["plan"],
            self.layer,
            layerwise["saved"],
            self.gamma,
            self.beta,
            self.epsilon,
        )
        inside: RaggedBatch = {**batch, "used": used}
        return normed, inside


class QueryKeyNorm(nn.Cell):
    """RMS norm of each head of queries and keys."""

    def __init__(self, shape: AttentionShape, epsilon: float) -> None:
        super().__init__()
        self.query_weight = ones(shape.head_dim, "query_weight")
        self.key_weight = ones(shape.head_dim, "key_weight")
        self.epsilon = float_constants(epsilon)
        self.heads = int_constants(shape.heads, shape.kv_heads)

    def construct(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        return operators.query_key_norm(
            x, batch["used"], self.query_weight, self.key_weight, self.epsilon, self.heads
        )


class MLP(nn.Cell):
    """hidden -> inner -> hidden. The first product or the activation writes packed inputs of the
    second one where it can, so the inner rows are never float32 in memory."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = up, down
        self.activation = activation

    def construct(self, x: Tensor, batch: RaggedBatch, residual: Optional[Tensor] = None) -> Tensor:
        up, down, used = self.dense_h_to_4h, self.dense_4h_to_h, batch["used"]
        name = self.activation + down.rounding
        if self.activation == "gelu":
            first = operators.linear_gelu(f"linear_{name}", down.row_bytes)
            inner = first(x, used, *up.operands, down.weight)
        else:
            inner = operators.swiglu(name, down.row_bytes)(up(x, batch), used, down.weight)
        return down(inner, batch, residual)


class NextToken(nn.Cell):
    """The most likely next token of each row."""

    def construct(
        self, hidden: Tensor, logits: Tensor, batch: RaggedBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, finite = operators.next_token(hidden, logits, batch["used"])
        return tokens, finite, logits


class KVCache(nn.Cell):
    """The keys and values of one or more users, in the layout of `kv_layout`.

    Positions after a user's last one are never read, so a slot need not be cleared for a new user.
    """

    def __init__(
        self,
        dtype: str,
        users: int,
        heads: int,
        positions: int,
        head_dim: int,
        preallocated: bool,
    ) -> None:
        super().__init__()
        room = capacity(dtype, positions, head_dim, preallocated)
        shapes = cache_shapes(dtype, users, heads, room, head_dim)
        self.keys, self.values = (
            PagedArray(shape, STORED[dtype], preallocated) for shape in shapes
        )
        self.key_past = parameter_of(self.keys.array, "key_past")
        self.value_past = parameter_of(self.values.array, "value_past")
        self.sizes = partial(head_sizes, dtype, head_dim=head_dim)

    def allocate(self) -> None:
        """Allocates the memory of all users."""
        self.keys.allocate()
        self.values.allocate()

    def trim(self, row: int, positions: int) -> None:
        """Frees the memory of a user after the first `positions` positions."""
        keys, values = self.sizes(positions=positions)
        self.keys.trim(row, keys)
        self.values.trim(row, values)

    def give_back(self) -> None:
        """Frees the memory of all users."""
        self.keys.give_back()
        self.values.give_back()


class Attention(nn.Cell):
    """Every row attends to its own user's keys and values, in one instruction.

    It takes the Parameters of all cells. The number of cells affects only the cost of compiling and
    launching.
    """

    def __init__(self, shape: AttentionShape, cache_dtype: str, preallocated: bool) -> None:
        super().__init__()
        self.shape = shape
        self.cache_dtype = cache_dtype
        self.preallocated = preallocated
        self.sizes = int_constants(shape.heads, shape.kv_heads, shape.head_dim)
        self.scale = float_constants(1.0 / math.sqrt(shape.head_dim))
        self.attention = operators.attention(shape.width)

    def set_layout(self, layout: CellLayout) -> None:
        """Allocates an empty cache for every user of `layout` and drops the old ones."""
        for cell in getattr(self, "kv_past", ()):
            cell.give_back()
        shape = (self.shape.kv_heads, layout.seq_length, self.shape.head_dim)
        cells = [
            KVCache(self.cache_dtype, users, *shape, self.preallocated) for users in layout.sizes
        ]
        self.kv_past = nn.CellList(cells)

    def construct(self, query_key_value: Tensor, batch: RaggedBatch) -> Tensor:
        past = [one for cell in self.kv_past for one in (cell.key_past, cell.value_past)]
        return self.attention(
            query_key_value,
            batch["used"],
            batch["users"],
            batch["positions"],
            batch["rotary_positions"],
            batch["cosine"],
            batch["sine"],
            batch["partner"],
            self.sizes,
            self.scale,
            *past,
        )


@dataclass(frozen=True)
class NativeBackend:
    """Cells computed by the native kernels.

    Attributes:
        weight_dtype: of the matrices and the embedding: "float32", "float16", "bfloat16", "int8" or
            "int4".
        rotary_dtype: in which the rotary tables are computed.
        input_dtype: that the inputs of products are rounded to: "float32", "bfloat16" or "int8".
        cache_dtype: of keys and values: "float32", "bfloat16" or "int8".
        weight_types: name of a parameter -> its type, if not `weight_dtype`; applied by
            `set_weight_types`.
        preallocated: whether caches are allocated before use, and keep their memory.
    """

    weight_dtype: str = "float32"
    rotary_dtype: str = "float32"
    input_dtype: str = "float32"
    cache_dtype: str = "float32"
    weight_types: Mapping[str, str] = field(default_factory=dict)
    preallocated: bool = False

    name = "native"
    dtype = "float32"
    layer_norm = LayerNorm
    rms_norm = RMSNorm
    entry_norm = EntryNorm
    query_key_norm = QueryKeyNorm
    next_token = NextToken

    def linear(self, inputs: int, outputs: int, bias: bool = True, factor: float = 1.0) -> Linear:
        packing = packing_of(self.weight_dtype, outputs, inputs)
        return Linear(packing, bias, factor, self.input_dtype)

    def mlp(
        self, hidden: int, inner: int, activation: str, bias: bool = True, factor: float = 1.0
    ) -> MLP:
        up = self.linear(hidden, inner_columns(activation, inner), bias)
        return MLP(up, self.linear(inner, hidden, bias, factor), activation)

    def embedding(self, vocab_size: int, hidden_size: int, name: str = "weight") -> Embedding:
        return Embedding(packing_of(self.weight_dtype, vocab_size, hidden_size), name)

    def attention(self, shape: AttentionShape) -> Attention:
        return Attention(shape, self.cache_dtype, self.preallocated)

    @property
    def kept_as(self) -> str:
        """Types of the matrices, for logs and statistics."""
        return described(self.weight_dtype, self.weight_types)

    def set_weight_types(self, model: nn.Cell) -> None:
        """Replaces the Parameters in `weight_types` by zeros of that type. Cells that shared one
        share the new one."""
        made: dict[str, Parameter] = {}
        for _, cell in model.cells_and_names():
            if not isinstance(cell, (Linear, Embedding)):
                continue
            attribute = cell.name_of_table if isinstance(cell, Embedding) else "weight"
            name = getattr(cell, attribute).name
            if name in self.weight_types:
                packing = cell.packing
                cell.packing = packing_of(self.weight_types[name], packing.outputs, packing.inputs)
                shape, dtype = cell.packing.shape, cell.packing.array_dtype
                if name not in made:
                    made[name] = zero_parameter(shape, dtype, name)
                setattr(cell, attribute, made[name])
