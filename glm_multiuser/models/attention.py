"""Attention weights from scores."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from glm_multiuser.models.layers import Numerics

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
