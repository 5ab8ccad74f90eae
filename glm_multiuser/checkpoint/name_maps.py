"""Names that moved to `layouts/` and `placement.py`, for those who still import them from here."""

from __future__ import annotations

from glm_multiuser.checkpoint.layouts import chatglm_6b
from glm_multiuser.checkpoint.layouts.chatglm_6b import shapes as glm_shapes
from glm_multiuser.checkpoint.placement import Placement, to_their_layout
from glm_multiuser.config import ModelConfig

__all__ = ["glm_shapes", "mindformers_placements", "to_their_layout"]


def mindformers_placements(num_layers: int) -> dict[str, Placement]:
    """Name in MindFormers' GLM -> its place; sizes other than the depth do not matter."""
    return chatglm_6b.mindformers_placements(ModelConfig(1, 4, num_layers, 1, 1))
