"""Prompts that enter whole: the context of ChatGLM-6B sees itself in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Optional

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.config import ModelConfig, prompt_lengths
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import DeviceResults, Job
from glm_multiuser.engine.scheduler import Piece
from glm_multiuser.engine.two_graphs import TwoGraphRunner
from glm_multiuser.models.kv_past import CellLayout
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.models.users import MOST_PROMPTS

PROMPT_ROWS = 64
"""Prompts enter together up to so many rows: beyond them little more is saved."""


def prompt_counts(layout: CellLayout, length: int) -> tuple[int, ...]:
    """How many prompts of one length the prefill graphs take in: one, and as many as pay.

    The second is a power of two, at most `MOST_PROMPTS`, and needs a cell that holds everybody.
    """
    if len(layout.sizes) > 1:
        return (1,)
    most = min(PROMPT_ROWS // length, layout.users, MOST_PROMPTS)
    return (1, 1 << most.bit_length() - 1) if most > 1 else (1,)


class WholePromptRunner(TwoGraphRunner):
    """Takes whole prompts in, several short ones of one padded length at once."""

    def _lay_out(self, users: int) -> None:
        super()._lay_out(users)
        self._prompt_counts = {
            length: prompt_counts(self.layout, length)
            for length in prompt_lengths(self.engine.seq_length)
        }
        self._positions: dict[int, PrefixPositions] = {}
        self._alone: Optional[NDArray[Any]] = None
        """Logits of the last prompt that was tried by itself."""

    def _prompt_jobs(self) -> list[Job]:
        return [
            (f"prefill {count} x {length}", partial(self._try_prompts, length, count))
            for length, counts in self._prompt_counts.items()
            for count in counts
        ]

    def _try_prompts(self, length: int, count: int) -> None:
        """Gives up taking in several prompts at once where that changes their bits."""
        token_ids = (np.arange(length) % self.vocab_size).tolist()
        rows = self._run_prompts([0] * count, [token_ids] * count, length)[2].asnumpy().copy()
        if count == 1:
            self._alone = rows
        elif self.engine.batch_invariant and not (rows == self._alone).all():
            self._prompt_counts[length] = (1,)

    def _padded_length(self, request: Request) -> int:
        length = len(request.prompt_token_ids)
        return next(padded for padded in self._prompt_counts if padded >= length)

    def take(self, prompts: Sequence[Request]) -> Sequence[int]:
        """The first prompt and those behind it that are padded to the same length, whole."""
        length = self._padded_length(prompts[0])
        most = self._prompt_counts[length][-1]
        alike = itertools.takewhile(lambda one: self._padded_length(one) == length, prompts[:most])
        return [len(request.prompt_token_ids) for request in alike]

    def prefill(self, prompts: Mapping[int, Piece]) -> DeviceResults:
        """Whole prompts of one length, by slot; result rows in the order of `prompts`."""
        requests = {slot: piece.request for slot, piece in prompts.items()}
        length = max(self._padded_length(request) for request in requests.values())
        replaced = self.layout.blocks_for(length)
        for slot in requests:
            # Before the graph runs, so that a device error cannot leave unknown memory behind.
            self._written_blocks[slot] = max(self._written_blocks[slot], replaced)
        count = next(size for size in self._prompt_counts[length] if size >= len(requests))
        slots = list(requests)
        # What is left over brings the first prompt again, to the same place.
        slots += slots[:1] * (count - len(slots))
        token_ids = [requests[slot].prompt_token_ids for slot in slots]
        tokens, finite, logits = self._run_prompts(slots, token_ids, length)
        for slot in requests:
            self._clear_behind(slot, replaced)
        rows = range(len(requests))
        return DeviceResults(tokens[: len(rows)], finite[: len(rows)], logits, rows)

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        super().restore(slot, request, saved)
        self._positions[slot] = self._positions_of(request.prompt_token_ids)

    def _positions_of(self, token_ids: Sequence[int]) -> PrefixPositions:
        config = self.model.config
        if not isinstance(config, ModelConfig):
            raise TypeError(f"{config.family} has no bidirectional context")
        return PrefixPositions.of(token_ids, config)

    def _position_ids(self, rows: int, places: Mapping[int, tuple[int, int]]) -> NDArray[Any]:
        position_ids = np.zeros((2, rows), np.int32)
        for row, (slot, position) in places.items():
            position_ids[:, row] = self._positions[slot].ids(position, position + 1)[:, 0]
        return position_ids

    def _run_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        input_ids = np.zeros((len(slots), length), np.int32)
        position_ids, lengths = [], []
        for row, (slot, token_ids) in enumerate(zip(slots, prompts)):
            positions = self._positions_of(token_ids)
            self._positions[slot] = positions
            input_ids[row, : len(token_ids)] = token_ids
            position_ids.append(positions.ids(0, length))
            lengths.append((positions.context_length, len(token_ids)))
        return self._run(
            input_ids.reshape(-1),
            np.concatenate(position_ids, 1),
            np.array(lengths),
            np.array(slots),
            0,
        )
