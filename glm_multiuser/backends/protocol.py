"""The interface between models and backends.

Cells are called as `cell(x, batch)`, where `x` is `[rows, size]` and `batch` is one of the kinds of
`models/batch.py`. Cells that add a residual take it as an optional third argument.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

from mindspore import nn


class AttentionShape(NamedTuple):
    """The attention of one layer."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; each is shared by `heads / kv_heads` query heads."""
    head_dim: int
    score_factor: Optional[float] = None
    """Queries are divided by it, and scores multiplied by it, so that float16 cannot overflow."""

    @property
    def width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim


def inner_columns(activation: str, inner: int) -> int:
    """Outputs of the first layer of an MLP with `inner` hidden units."""
    return 2 * inner if activation == "swiglu" else inner


class Backend(Protocol):
    """Makes the cells of a model."""

    @property
    def name(self) -> str:
        """ "native" or "portable"."""

    @property
    def weight_dtype(self) -> str:
        """Type of the matrices, unless `set_weight_types` gives them another one."""

    @property
    def kept_as(self) -> str:
        """Types of the matrices, for logs and statistics."""

    def set_weight_types(self, model: nn.Cell) -> None:
        """Gives matrices of a new model the types that they have instead of `weight_dtype`."""

    @property
    def dtype(self) -> str:
        """Type of activations and vectors: "float32" or "float16"."""

    @property
    def cache_dtype(self) -> str:
        """Type of keys and values."""

    @property
    def rotary_dtype(self) -> str:
        """Type in which rotary angles, cosines and sines are computed."""

    def linear(self, inputs: int, outputs: int, bias: bool = True, factor: float = 1.0) -> nn.Cell:
        """`x @ weight.T + bias`, weight `[outputs, inputs]`; parameters `weight` and `bias`.

        Args:
            factor: a residual `[rows, outputs]` is multiplied by it before it is added.
        """

    def mlp(
        self, hidden: int, inner: int, activation: str, bias: bool = True, factor: float = 1.0
    ) -> nn.Cell:
        """Two linear layers, `dense_h_to_4h` and `dense_4h_to_h`, with an activation in between.

        Args:
            activation: "gelu" (tanh approximation), or "swiglu", `silu(gate) * up`, where the first
                layer has `2 * inner` outputs, those of the gate first.
            factor: as in `linear`, for the second layer.
        """

    def embedding(self, vocab_size: int, hidden_size: int, name: str = "weight") -> nn.Cell:
        """Token ids int32 [rows] -> rows of the table, a parameter called `name`."""

    def layer_norm(self, size: int, epsilon: float) -> nn.Cell:
        """Layer norm over the last axis; parameters `gamma` and `beta`; optional residual."""

    def rms_norm(self, size: int, epsilon: float) -> nn.Cell:
        """Root mean square norm over the last axis; parameter `weight`; optional residual."""

    def entry_norm(self, size: int, epsilon: float, layer: int) -> nn.Cell:
        """Layer norm before layer `layer`, where rows of prompts may join or leave the batch.

        The cell returns the normed rows and the batch for this layer. The final norm counts as the
        last layer.
        """

    def query_key_norm(self, shape: AttentionShape, epsilon: float) -> nn.Cell:
        """RMS norm of each query head and each key head in the output of `query_key_value`.

        Parameters `query_weight` and `key_weight` [head_dim]; values are unchanged.
        """

    def attention(self, shape: AttentionShape) -> nn.Cell:
        """Attention of every row over its own user's keys and values, which the cell holds.

        It takes the output of `query_key_value`, all queries, then all keys, then all values,
        `[rows, width + 2 * kv_width]`, applies the rotary embedding, writes the cache, and returns
        the context `[rows, width]`. `set_layout(layout)` allocates an empty cache for every user of
        a `CellLayout`, in the cells of `kv_past`.
        """

    def next_token(self) -> nn.Cell:
        """`cell(hidden, logits, batch)` -> the most likely next token of each row, int32 [rows];
        0 if the row is finite, otherwise NaN, [rows]; logits in the softmax type.
        """
