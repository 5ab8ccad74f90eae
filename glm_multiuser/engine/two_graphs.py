"""Prompts and decode rows in graphs of their own, of MindSpore's operators: they run on any device.

Every method runs on the device thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Optional

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.config import BLOCK_LENGTH
from glm_multiuser.engine.padding import invariant_rows
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import DeviceResults, GraphRunner, Job, to_tensor
from glm_multiuser.engine.scheduler import Piece, Step
from glm_multiuser.models.graphs import Forward, ReplacePast, read_past, zero_past
from glm_multiuser.models.kv_past import CellLayout

SMALLEST_BATCH = 4


def block_counts(blocks: int) -> tuple[int, ...]:
    """How many cache blocks the decode graphs read: powers of two, and all."""
    return (*(2**power for power in range(math.ceil(math.log2(blocks)))), blocks)


def batch_sizes(layout: CellLayout) -> tuple[int, ...]:
    """How many users the decode graphs serve: at most three sizes, however many users there are.

    A graph for fewer than all users copies their rows out of the caches, which pays up to about a
    third of them, and only if one cell holds everybody.
    """
    users = layout.users
    if len(layout.sizes) > 1:
        return (users,)
    quarter = users // 4
    return tuple(sorted({size for size in (min(SMALLEST_BATCH, quarter), quarter, users) if size}))


class TwoGraphRunner(GraphRunner):
    """Graphs for prompts and others for decode rows; subclasses know how a prompt enters."""

    kernels = "portable"

    def _lay_out(self, users: int) -> None:
        self.users = users
        self.layout = CellLayout.plan(
            users,
            self.engine.seq_length,
            BLOCK_LENGTH,
            None if self.engine.users_per_cell is None else min(self.engine.users_per_cell, users),
        )
        self.model.set_layout(self.layout)
        self._forward: Any = Forward(self.model)
        self._replace_past: Any = ReplacePast(self.model)
        zeros = {length: zero_past(self.model, length) for length in set(self.layout.block_lengths)}
        self._zeros = [zeros[length] for length in self.layout.block_lengths]
        self._block_counts = block_counts(len(self.layout.block_lengths))
        self._batch_sizes = batch_sizes(self.layout)
        self._rows = {size: size for size in self._batch_sizes}
        self._written_blocks = [0] * users

    def _entries(self) -> Sequence[Any]:
        entries = (self._forward, self._replace_past)
        return [entry for entry in entries if entry is not None]

    def _forget_entries(self) -> None:
        self._forward = self._replace_past = None

    def _jobs(self) -> list[Job]:
        # A single slot has nobody to share with and may use the faster one-row product.
        if self.engine.batch_invariant and self.users > 1:
            self._rows = invariant_rows(self.model.linears(), self._batch_sizes)
        jobs = self._prompt_jobs()
        for block in range(len(self.layout.block_lengths)):
            jobs.append((f"clear block {block}", partial(self._clear, 0, block)))
        for size, blocks in itertools.product(self._batch_sizes, self._block_counts):
            positions = sum(self.layout.block_lengths[:blocks])
            what = f"decode {size} users, {positions} positions"
            jobs.append((what, partial(self._try_decode, size, blocks)))
        return jobs

    def _try_decode(self, size: int, blocks: int) -> NDArray[Any]:
        """-> logits of a step in which every row holds the same token: rows that must be equal."""
        rows = self._rows[size]
        results = self._run_decode(
            np.zeros(rows), self._position_ids(rows, {}), np.full(size, -1), np.arange(size), blocks
        )
        logits: NDArray[Any] = results[2].asnumpy()
        return logits[:size].copy()

    def _prompt_jobs(self) -> list[Job]:
        """Every graph that takes prompts in."""
        raise NotImplementedError

    def _position_ids(self, rows: int, places: Mapping[int, tuple[int, int]]) -> NDArray[Any]:
        """Position ids for a decode graph of so many rows; `places`: row -> (slot, position)."""
        raise NotImplementedError

    def parts(self, step: Step) -> Sequence[Step]:
        """Prompts first, and then everybody else's next token."""
        return step.parts()

    def run(self, step: Step) -> DeviceResults:
        return self.prefill(step.prompts) if step.prompts else self.decode(step.decodes)

    def prefill(self, prompts: Mapping[int, Piece]) -> DeviceResults:
        """The next tokens of prompts, by slot; result rows in the order of `prompts`."""
        raise NotImplementedError

    def decode(self, requests: Mapping[int, Request]) -> DeviceResults:
        """One new token for each request, by slot; result rows in the order of `requests`."""
        size = next(size for size in self._batch_sizes if size >= len(requests))
        everybody = size == self.users
        rows = self._rows[size]
        # With everybody in the graph a user's row is its slot; otherwise rows are taken in turn,
        # and the rows that are left over point at other slots and write nothing.
        slots = list(requests)
        if not everybody:
            others = (slot for slot in range(self.users) if slot not in requests)
            slots += [next(others) for _ in range(size - len(requests))]
        row_of = {slot: slot if everybody else row for row, slot in enumerate(slots)}
        input_ids, positions = np.zeros(rows, np.int32), np.full(size, -1, np.int32)
        places = {}
        for slot, request in requests.items():
            row, position = row_of[slot], len(request) - 1
            input_ids[row] = request.output_token_ids[-1]
            positions[row] = position
            places[row] = (slot, position)
            used = self.layout.blocks_for(position + 1)
            self._written_blocks[slot] = max(self._written_blocks[slot], used)
        used = self.layout.blocks_for(int(positions.max()) + 1)
        blocks = next(count for count in self._block_counts if count >= used)
        tokens, finite, logits = self._run_decode(
            input_ids,
            self._position_ids(rows, places),
            positions,
            np.array(slots, np.int32),
            blocks,
        )
        order = [row_of[slot] for slot in requests]
        return DeviceResults(tokens[order], finite[order], logits, order)

    def save(self, slot: int, request: Request) -> list[NDArray[Any]]:
        """Copies a slot's keys and values to the host, block by block."""
        blocks = self.layout.blocks_for(request.computed_tokens)
        return [read_past(self.model, slot, block) for block in range(blocks)]

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        """Puts into a slot what `save` copied out of this or another one."""
        self._written_blocks[slot] = max(self._written_blocks[slot], len(saved))
        for block, past in enumerate(saved):
            self._replace(slot, block, Tensor(past))
        self._clear_behind(slot, len(saved))

    def _clear_behind(self, slot: int, blocks: int) -> None:
        """Makes what an earlier user wrote behind the first `blocks` new memory."""
        for block in range(blocks, self._written_blocks[slot]):
            self._clear(slot, block)
        self._written_blocks[slot] = blocks

    def _clear(self, slot: int, block: int) -> None:
        self._replace(slot, block, self._zeros[block])

    def _replace(self, slot: int, block: int, past: Tensor) -> None:
        self._replace_past(to_tensor(np.array(slot)), past, block).asnumpy()

    def _run_decode(
        self,
        input_ids: NDArray[Any],
        position_ids: NDArray[Any],
        positions: NDArray[Any],
        slots: NDArray[Any],
        blocks: int,
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        everybody = len(positions) == self.users
        return self._run(input_ids, position_ids, positions, None if everybody else slots, blocks)

    def _run(
        self,
        input_ids: NDArray[Any],
        position_ids: NDArray[Any],
        positions: NDArray[Any],
        users: Optional[NDArray[Any]],
        blocks: int,
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        return self._run_graph(self._forward, input_ids, position_ids, positions, users, blocks)
