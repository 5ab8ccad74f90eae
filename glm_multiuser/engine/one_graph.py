"""Prompts and decode rows in one graph, by native kernels.

Every step is some tokens, each with its user and its position; a decoding user brings one, a
prompt as many as there is room for. One compiled graph serves every step. A row's bits depend on
nothing but its own tokens, so a prompt may be cut anywhere and stand beside anybody.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser import device
from glm_multiuser.config import ModelConfig
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import DeviceResults, GraphRunner, Job
from glm_multiuser.engine.scheduler import Step
from glm_multiuser.kernels import library
from glm_multiuser.models.graphs import ForwardUsers
from glm_multiuser.models.kv_past import CellLayout
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.models.user_past import read_user_past, write_user_past

ROWS_TRIED = 16
"""Rows that are compared with one alone when an engine starts."""


class OneGraphRunner(GraphRunner):
    """Runs any tokens of any users as one graph."""

    kernels = "native"

    def _lay_out(self, users: int) -> None:
        self.users = users
        per_cell = min(self.engine.users_per_cell or users, users)
        length = self.engine.seq_length
        self.layout = CellLayout.plan(users, length, length, per_cell)
        self.model.set_layout(self.layout)
        self._forward: Any = ForwardUsers(self.model)
        # MindSpore's phase for incremental inference: once compiled, a call goes straight to the
        # graph. Its checks of arguments and cells, which cannot have changed, cost milliseconds.
        self._forward.phase = "increment"
        self._on_the_way: list[Request] = []
        """Prompts that go through the layers together, and not yet through all of them."""
        self._first_layer = self._last_layer = 0
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

    @property
    def kernel_level(self) -> str:
        return library.level()

    @property
    def weight_dtype(self) -> str:
        return self.model.numerics.weight

    def _jobs(self) -> list[Job]:
        jobs: list[Job] = [("the graph of every step", partial(self._try, 1))]
        if self.users > 1:
            jobs.append(("several users in it", partial(self._try, min(self.users, ROWS_TRIED))))
        return jobs

    def _try(self, users: int) -> NDArray[Any]:
        """-> logits of as many users who bring the same token: rows that must be equal."""
        # What it leaves at the first position, nobody reads before it is overwritten.
        angles = [0] * self._parts_of_head
        columns = np.array([(0, user, 0, 1, *angles) for user in range(users)], np.int32).T
        everything = [users, users, 0, self.model.config.num_layers + 1]
        results = self._run_tokens(columns[:4], columns[4:], range(users), users, everything)
        return results.logits(range(users)).copy()

    def take(self, prompts: Sequence[Request]) -> Sequence[int]:
        """Prompts in turn, as long as there is room.

        The last one of a causal model is cut. Others enter whole: one that is longer than there is
        room goes through some layers in each step, and the last step takes it in.
        """
        if not self.model.config.is_causal:
            return self._take_whole(prompts)
        counts: list[int] = []
        room = self._room
        for request in prompts:
            if room <= 0:
                break
            counts.append(min(len(request.prompt_token_ids) - request.computed_tokens, room))
            room -= counts[-1]
        return counts

    def _take_whole(self, prompts: Sequence[Request]) -> Sequence[int]:
        lengths = [len(request.prompt_token_ids) for request in prompts]
        on_the_way = self._on_the_way
        if not on_the_way or list(prompts[: len(on_the_way)]) != on_the_way:
            fit = [total <= self._room for total in itertools.accumulate(lengths)]
            self._on_the_way = list(prompts[: max(1, sum(fit))])
            self._first_layer = 0
        lengths = lengths[: len(self._on_the_way)]
        all_layers = self.model.config.num_layers
        layers = max(1, self._room * all_layers // sum(lengths))
        self._last_layer = min(self._first_layer + layers, all_layers)
        return lengths if self._last_layer == all_layers else [0] * len(lengths)

    def parts(self, step: Step) -> Sequence[Step]:
        """One graph does it all."""
        return [step] if step.requests else []

    def run(self, step: Step) -> DeviceResults:
        """Result rows in the order of `Step.answered`."""
        tokens: list[tuple[int, ...]] = []
        last: dict[int, int] = {}
        for slot, request in step.decodes.items():
            tokens += self._tokens_of(slot, request, 1)
            last[slot] = len(tokens) - 1
        always = len(tokens)
        for slot, piece in step.prompts.items():
            request = piece.request
            whole = len(request.prompt_token_ids)
            count = piece.tokens if self.model.config.is_causal else whole
            tokens += self._tokens_of(slot, request, count)
            last[slot] = len(tokens) - 1
        first_layer, last_layer = self._layers_of(step)
        rows = [last[slot] for slot in step.answered]
        columns = np.array(tokens, np.int32).T
        results = self._run_tokens(
            columns[:4],
            columns[4:],
            rows,
            always if first_layer else len(tokens),
            [len(tokens), always, first_layer, last_layer],
        )
        return results

    def _layers_of(self, step: Step) -> tuple[int, int]:
        """The layers that the prompts go through in this step; the final norm is the last one."""
        everything = self.model.config.num_layers + 1
        if self.model.config.is_causal or not step.prompts:
            return 0, everything
        first, last = self._first_layer, self._last_layer
        self._first_layer = last
        if last < self.model.config.num_layers:
            return first, last
        self._on_the_way = []
        return first, everything

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

    def _run_tokens(
        self, tokens: Any, angles: Any, rows: Sequence[int], new: int, plan: Sequence[int]
    ) -> DeviceResults:
        count = plan[0]
        columns = np.zeros((4 + self._parts_of_head, self._height), np.int32)
        columns[:, :count] = (*tokens, *angles)
        padded_rows = np.zeros(self.users, np.int32)
        padded_rows[: len(rows)] = rows
        results, finite, logits = self._run_graph(
            self._forward,
            columns[0],
            columns[1],
            columns[2:4],
            np.array([new]),
            columns[4:],
            np.array(plan),
            padded_rows,
            np.array([len(rows)]),
        )
        chosen = range(len(rows))
        return DeviceResults(results[: len(rows)], finite[: len(rows)], logits, chosen)

    def save(self, slot: int, request: Request) -> list[NDArray[Any]]:
        """Copies a slot's keys and values to the host."""
        return read_user_past(self.model, slot, request.computed_tokens)

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        """Puts into a slot what `save` copied out of this or another one."""
        write_user_past(self.model, slot, saved)
