"""Position ids of a ChatGLM-6B sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.model_config import AnyModelConfig, ChatGLM6BConfig


@dataclass(frozen=True)
class PrefixPositions:
    """Positions of a sequence with a bidirectional context.

    Attributes:
        context_length: tokens before the first `<sop>`; all of them if there is none.
        mask_position: the first position id of all tokens after the context.
    """

    context_length: int
    mask_position: int

    @classmethod
    def of(cls, token_ids: Sequence[int], config: AnyModelConfig) -> PrefixPositions:
        """As in the published model, `[gMASK]` takes precedence over `[MASK]`, and the first one
        counts. Without either, the end of the context is used.

        Raises:
            TypeError: the model is causal.
        """
        if not isinstance(config, ChatGLM6BConfig):
            raise TypeError(f"{config.family} has no bidirectional context")
        ids = list(token_ids)
        context_length = ids.index(config.bos_token_id) if config.bos_token_id in ids else len(ids)
        for mask in (config.gmask_token_id, config.mask_token_id):
            if mask in ids:
                return cls(context_length, ids.index(mask))
        return cls(context_length, max(context_length - 1, 0))

    def at(self, position: int) -> tuple[int, int]:
        """Position ids of one token."""
        first = position if position < self.context_length else self.mask_position
        return first, max(position - self.context_length + 1, 0)

    def ids(self, start: int, stop: int) -> NDArray[Any]:
        """Position ids of tokens `start` to `stop`, int32 [2, stop - start]."""
        pairs = np.array([self.at(position) for position in range(start, stop)], np.int32)
        return np.ascontiguousarray(pairs.reshape(-1, 2).T)
