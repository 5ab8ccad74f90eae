"""Prompts and decode rows in one graph, by native kernels.

Every step is some tokens, each with its user and its position; a decoding user brings one, a
prompt as many as there is room for. One compiled graph serves every step. A row's bits depend on
nothing but its own tokens, so a prompt may be cut anywhere and stand beside anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import device
from glm_multiuser.config import ModelConfig
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import DeviceResults, GraphRunner, Job
from glm_multiuser.engine.scheduler import Step
from glm_multiuser.models.graphs import ForwardUsers
from glm_multiuser.models.kv_past import CellLayout
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.models.user_past import read_user_past, write_user_past


class OneGraphRunner(GraphRunner):
    """Runs any tokens of any users as one graph."""

    kernels = "native"

    def _lay_out(self, users: int) -> None:
        self.users = users
        self.layout = CellLayout.plan(users, self.engine.seq_length, self.engine.seq_length, 1)
        self.model.set_layout(self.layout)
        self._forward: Any = ForwardUsers(self.model)
        # MindSpore's phase for incremental inference: once compiled, a call goes straight to the
        # graph. Its checks of arguments and cells, which cannot have changed, cost milliseconds.
        self._forward.phase = "increment"
        self._prefixes: dict[int, tuple[Request, PrefixPositions]] = {}
        config = self.model.config
        chunk = self.engine.prefill_chunk or device.PREFILL_CHUNK_NATIVE
        self._room = min(chunk, self.engine.seq_length)
        """Tokens of prompts in one step; a prompt that has to enter whole may be longer."""
        longest = self._room if config.is_causal else self.engine.seq_length
        self._height = users + longest
        self._parts_of_head = 1 if config.is_causal else 2

    def _entries(self) -> Sequence[Any]:
        return [self._forward] if self._forward is not None else []

    def _forget_entries(self) -> None:
        self._forward = None

    def _jobs(self) -> list[Job]:
        return [("the graph of every step", self._try)]

    def _try(self) -> None:
        # No token: nothing is written.
        self._run_tokens([], [], [])

    def take(self, prompts: Sequence[Request]) -> Sequence[int]:
        """Prompts in turn, as long as there is room; the last one is cut if it may be."""
        counts: list[int] = []
        for request in prompts:
            rest = len(request.prompt_token_ids) - request.computed_tokens
            room = self._room - sum(counts)
            if self.model.config.is_causal:
                rest = min(rest, room)
            elif counts and rest > room:
                break
            if rest <= 0:
                break
            counts.append(rest)
        return counts

    def parts(self, step: Step) -> Sequence[Step]:
        """One graph does it all."""
        return [step] if step.requests else []

    def run(self, step: Step) -> DeviceResults:
        """Result rows in the order of `Step.answered`."""
        counts = {slot: piece.tokens for slot, piece in step.prompts.items()}
        tokens: list[tuple[int, ...]] = []
        last: dict[int, int] = {}
        for slot, request in step.requests.items():
            tokens += self._tokens_of(slot, request, counts.get(slot, 1))
            last[slot] = len(tokens) - 1
        rows = [last[slot] for slot in step.answered]
        columns = np.array(tokens, np.int32).T
        return self._run_tokens(columns[:4], columns[4:], rows)

    def _tokens_of(self, slot: int, request: Request, count: int) -> Iterator[tuple[int, ...]]:
        """(token id, slot, its position, how many positions it sees, rotary positions) of each."""
        start = request.computed_tokens
        token_ids = request.token_ids(start, start + count)
        positions = range(start, start + count)
        if self.model.config.is_causal:
            for token_id, position in zip(token_ids, positions):
                yield token_id, slot, position, position + 1, position
            return
        prefix = self._prefix_of(slot, request)
        angles = prefix.ids(start, start + count)
        for row, (token_id, position) in enumerate(zip(token_ids, positions)):
            seen = max(position + 1, prefix.context_length)
            yield token_id, slot, position, seen, angles[0, row], angles[1, row]

    def _prefix_of(self, slot: int, request: Request) -> PrefixPositions:
        known = self._prefixes.get(slot)
        if known is None or known[0] is not request:
            config = self.model.config
            if not isinstance(config, ModelConfig):
                raise TypeError(f"{config.family} has no bidirectional context")
            known = request, PrefixPositions.of(request.prompt_token_ids, config)
            self._prefixes[slot] = known
        return known[1]

    def _run_tokens(self, tokens: Any, angles: Any, rows: Sequence[int]) -> DeviceResults:
        count = len(tokens[0]) if len(tokens) else 0
        columns = np.zeros((4 + self._parts_of_head, self._height), np.int32)
        if count:
            columns[:, :count] = (*tokens, *angles)
        padded_rows = np.zeros(self.users, np.int32)
        padded_rows[: len(rows)] = rows
        results, finite, logits = self._run_graph(
            self._forward,
            columns[0],
            columns[1],
            columns[2:4],
            np.array([count]),
            columns[4:],
            padded_rows,
            np.array([len(rows)]),
        )
        chosen = range(len(rows))
        return DeviceResults(results[: len(rows)], finite[: len(rows)], logits, chosen)

    def save(self, slot: int, request: Request) -> list[NDArray[Any]]:
        """Copies a slot's keys and values to the host."""
        return read_user_past(self.model.layer_cells(), slot, request.computed_tokens)

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        """Puts into a slot what `save` copied out of this or another one."""
        write_user_past(self.model.layer_cells(), slot, saved)
