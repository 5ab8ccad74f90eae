"""Prompts that enter in chunks: in a causal model no token needs a later one.

Where a prompt is cut depends on nothing but the prompt, so its bits do not depend on who else is
there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser import device
from glm_multiuser.config import prompt_lengths
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import DeviceResults, Job
from glm_multiuser.engine.scheduler import Piece
from glm_multiuser.engine.two_graphs import TwoGraphRunner


class ChunkRunner(TwoGraphRunner):
    """Takes prompts in chunk by chunk, behind what their slots already hold of them."""

    def _lay_out(self, users: int) -> None:
        super()._lay_out(users)
        chunk = self.engine.prefill_chunk or device.PREFILL_CHUNK[self.engine.device_target]
        self._chunk_lengths = prompt_lengths(min(chunk, self.engine.seq_length))

    def _prompt_jobs(self) -> list[Job]:
        return [
            (
                f"prefill {length} tokens, {sum(self.layout.block_lengths[:blocks])} positions",
                partial(self._try_chunk, length, blocks),
            )
            for length, blocks in itertools.product(self._chunk_lengths, self._block_counts)
        ]

    def _try_chunk(self, length: int, blocks: int) -> None:
        # It leaves one token at position 0, which the first chunk of any prompt replaces.
        self._run_chunk(0, [0], 0, length, blocks)

    def take(self, prompts: Sequence[Request]) -> Sequence[int]:
        """The next chunk of the first prompt."""
        request = prompts[0]
        rest = len(request.prompt_token_ids) - request.computed_tokens
        return [min(rest, self._chunk_lengths[-1])]

    def prefill(self, prompts: Mapping[int, Piece]) -> DeviceResults:
        """The next chunk of one request, by slot; the result is that of its last token."""
        ((slot, piece),) = prompts.items()
        start = piece.request.computed_tokens
        token_ids = piece.request.prompt_token_ids[start : start + piece.tokens]
        length = next(length for length in self._chunk_lengths if length >= len(token_ids))
        used = self.layout.blocks_for(start + len(token_ids))
        blocks = next(count for count in self._block_counts if count >= used)
        # Before the graph runs, so that a device error cannot leave unknown memory behind.
        self._written_blocks[slot] = max(self._written_blocks[slot], blocks)
        tokens, finite, logits = self._run_chunk(slot, token_ids, start, length, blocks)
        self._clear_behind(slot, blocks)
        return DeviceResults(tokens[:1], finite[:1], logits, [0])

    def _position_ids(self, rows: int, places: Mapping[int, tuple[int, int]]) -> NDArray[Any]:
        position_ids = np.zeros(rows, np.int32)
        for row, (_, position) in places.items():
            position_ids[row] = position
        return position_ids

    def _run_chunk(
        self, slot: int, token_ids: Any, start: int, length: int, blocks: int
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        input_ids = np.zeros(length, np.int32)
        input_ids[: len(token_ids)] = token_ids
        last = self.engine.seq_length - 1
        return self._run(
            input_ids,
            np.minimum(np.arange(start, start + length), last),
            np.array([[start, len(token_ids)]]),
            np.array(slot),
            blocks,
        )
