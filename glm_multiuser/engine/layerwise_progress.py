"""Layer-wise prefill of ChatGLM-6B's long prompts, which cannot be chunked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from glm_multiuser.engine.request import Request


class LayerRange(NamedTuple):
    """The layers that the prompts of a step go through."""

    first: int
    last: int
    """Not included; the final norm counts as the last layer."""


class LayerwiseProgress:
    """Progress of prompts of ChatGLM-6B that are too long for one step.

    They cannot be chunked, because their attention is bidirectional. They go through some of the
    layers in each step, together with the next tokens of the other users.

    Args:
        layers: of the model.
        room: prompt tokens that can go through all layers in one step.
    """

    def __init__(self, layers: int, room: int) -> None:
        self.layers = layers
        self.room = room
        self._group: list[Request] = []
        self._next_layer = 0

    def group(self, prompts: Sequence[Request]) -> list[Request]:
        """The prompts that go through layers together: those in progress, or the next that fit."""
        count = len(self._group)
        if count and list(prompts[:count]) == self._group:
            return self._group
        totals = itertools.accumulate(len(request.prompt_token_ids) for request in prompts)
        return list(prompts[: max(1, sum(total <= self.room for total in totals))])

    def layers_of(self, group: Sequence[Request]) -> LayerRange:
        """The layers for this group in the next step."""
        first = self._next_layer if list(group) == self._group else 0
        tokens = sum(len(request.prompt_token_ids) for request in group)
        last = first + max(1, self.room * self.layers // tokens)
        return LayerRange(first, self.layers + 1 if last >= self.layers else last)

    def advance(self, group: Sequence[Request], layers: LayerRange) -> None:
        """Records that the group has gone through these layers."""
        is_through = layers.last > self.layers
        self._group = [] if is_through else list(group)
        self._next_layer = 0 if is_through else layers.last
