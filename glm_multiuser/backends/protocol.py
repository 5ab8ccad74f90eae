"""What a backend offers to a model.

Every cell is called with rows and the batch that they belong to, `cell(x, batch)`, where `x` is
`[rows, size]` and `batch` one of the kinds of `models/batch.py`. Cells whose result is added to a
residual take it as a third argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional, Protocol

from mindspore import nn


class AttentionShape(NamedTuple):
    """The attention of one layer."""

    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values; each is shared by `heads / kv_heads` heads of queries."""
    head_dim: int
    score_factor: Optional[float] = None
    """Queries are divided by it, scores multiplied again, so that float16 cannot overflow."""

    @property
    def width(self) -> int:
        """Numbers of all heads of queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of all heads of keys, and of values."""
        return self.kv_heads * self.head_dim


def inner_columns(activation: str, inner: int) -> int:
    """Outputs of an MLP's first layer, whose activation gives `inner` numbers."""
    return 2 * inner if activation == "swiglu" else inner


class Backend(Protocol):
    """Makes the cells of a model."""

    @property
    def name(self) -> str:
        """ "native" or "portable"."""

    @property
    def weight_dtype(self) -> str:
        """Type of the matrices, but for those in `weight_types`."""

    @property
    def weight_types(self) -> Mapping[str, str]:
        """Name of a parameter -> its type, where it is another one."""

    @property
    def kept_as(self) -> str:
        """Types of the matrices, in words."""

    def set_weight_types(self, model: nn.Cell) -> None:
        """Makes it so, in a new model."""

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
            factor: what a residual `[rows, outputs]` is multiplied with before it is added to the
                result.
        """

    def mlp(
        self, hidden: int, inner: int, activation: str, bias: bool = True, factor: float = 1.0
    ) -> nn.Cell:
        """Two linear layers, `dense_h_to_4h` and `dense_4h_to_h`, with an activation between.

        Args:
            activation: "gelu", in its tanh form, or "swiglu", `silu(gate) * up`; then the first
                layer has `2 * inner` outputs, the gate's first.
            factor: as that of `linear`, for the second layer.
        """

    def embedding(self, vocab_size: int, hidden_size: int, name: str = "weight") -> nn.Cell:
        """Token ids int32 [rows] -> rows of the table, a parameter called `name`."""

    def layer_norm(self, size: int, epsilon: float) -> nn.Cell:
        """Layer norm over the last axis; parameters `gamma` and `beta`; may add a residual."""

    def rms_norm(self, size: int, epsilon: float) -> nn.Cell:
        """Root mean square norm over the last axis; parameter `weight`; may add a residual."""

    def entry_norm(self, size: int, epsilon: float, layer: int) -> nn.Cell:
        """Layer norm in front of layer `layer`, where rows of prompts may join or leave the batch.

        The cell returns the normed rows and the batch as this layer sees it. The final norm counts
        as the last layer.
        """

    def query_key_norm(self, shape: AttentionShape, epsilon: float) -> nn.Cell:
        """RMS norm of each head of queries and of keys in what `query_key_value` gives.

        Parameters `query_weight` and `key_weight` [head_dim]; values stay as they are.
        """

    def attention(self, shape: AttentionShape) -> nn.Cell:
        """Attention of every row over its own user's keys and values, which the cell holds.

        It takes what `query_key_value` gives, all queries, then all keys, then all values,
        `[rows, width + 2 * kv_width]`, rotates and caches it, and returns the context
        `[rows, width]`. `set_layout(layout)` gives every user of a `CellLayout` an empty cache, in
        the cells of `kv_past`.
        """

    def next_token(self) -> nn.Cell:
        """`cell(hidden, logits, batch)` -> for each row its most likely next token, int32 [rows];
        0 where all is finite and NaN where not, [rows]; logits in the softmax type.
        """
