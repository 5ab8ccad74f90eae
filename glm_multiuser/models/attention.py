"""Self-attention: projections, and the attention of a prompt over itself."""

from __future__ import annotations

import math

from mindspore import Tensor, nn, ops

from glm_multiuser.config import ModelConfig
from glm_multiuser.models.layers import Linear, Numerics, RotaryEmbedding2D

MASKED = -10000.0
"""Added to the score of a position that must not be seen, as in the published model."""


class ScaledSoftmax(nn.Cell):
    """Attention weights from scores, computed in the softmax type.

    The published model divides queries by the number of the layer, so that float16 scores cannot
    overflow, and multiplies the scores back here.
    """

    def __init__(self, layer_number: int, numerics: Numerics) -> None:
        super().__init__()
        self.layer_number = float(layer_number)
        self.softmax_type = numerics.softmax_type
        self.compute_type = numerics.compute_type
        self.softmax = ops.Softmax(axis=-1)

    def construct(self, scores: Tensor, mask: Tensor) -> Tensor:
        """`scores` [n, heads, t, positions] and `mask`, 0 or `MASKED`, broadcast to it."""
        scores = ops.cast(scores, self.softmax_type) * self.layer_number + mask
        return ops.cast(self.softmax(scores), self.compute_type)


class SelfAttention(nn.Cell):
    """Queries, keys and values of new tokens, and how the tokens of one prompt see each other."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        numerics: Numerics,
        rotary: RotaryEmbedding2D,
        softmax: ScaledSoftmax,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads, self.head_dim, self.hidden = config.num_attention_heads, config.head_dim, hidden
        self.query_scale = 1.0 / (math.sqrt(config.head_dim) * layer_number)
        self.query_key_value = Linear(hidden, 3 * hidden, numerics)
        self.dense = Linear(hidden, hidden, numerics)
        self.rotary = rotary
        self.softmax = softmax
        self.split = ops.Split(axis=1, output_num=2)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weigh = ops.BatchMatMul()

    def project(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """`hidden` [rows, hidden_size] -> scaled query, key, value `[rows, heads, head_dim]`."""
        rows = hidden.shape[0]
        projected = self.query_key_value(hidden)
        query_key = projected[:, : 2 * self.hidden].reshape(rows, 2 * self.heads, self.head_dim)
        value = projected[:, 2 * self.hidden :].reshape(rows, self.heads, self.head_dim)
        query, key = self.split(self.rotary(query_key, angles[0], angles[1]))
        return query * self.query_scale, key, value

    def construct(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of whole prompts over themselves.

        Args:
            query: `[prompts, heads, t, head_dim]`, scaled; `key` and `value` likewise.
            mask: 0 or `MASKED`, broadcast to `[prompts, heads, t, t]`.

        Returns:
            `[prompts * t, hidden_size]`.
        """
        weights = self.softmax(self.scores(query, key), mask)
        context = ops.transpose(self.weigh(weights, value), (0, 2, 1, 3))
        return context.reshape(-1, self.hidden)
