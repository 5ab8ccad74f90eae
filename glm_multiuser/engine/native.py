"""The native runner: prompts and decode rows in one graph.

A step is a ragged batch of tokens, each with its user and its position: one token of each decoding
user, and as many prompt tokens as fit. One compiled graph serves every step. A row's bits depend on
its own tokens alone (batch invariance), so chunked prefill may split a prompt anywhere.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from glm_multiuser import device
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.kv_layout import clear_last_tile, head_sizes, held_bytes
from glm_multiuser.engine.chunk_length import ChunkLength
from glm_multiuser.engine.graph_runner import GraphRunner, Job
from glm_multiuser.engine.layerwise_progress import LayerRange, LayerwiseProgress
from glm_multiuser.engine.native_graph import NativeForward
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import Step
from glm_multiuser.mindspore_internals import check_shared_memory, memory_of
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.sessions.session import CacheBytes

INVARIANCE_ROWS = 16
"""Maximum number of rows that are compared with a single row when an engine starts."""


@dataclass
class HostResults:
    """`RowResults` in host memory that the next step overwrites."""

    tokens: Sequence[int]
    finite: Sequence[bool]
    host_logits: NDArray[Any]

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        return self.host_logits[list(rows)]


class NativeRunner(GraphRunner):
    """Runs any tokens of any users as one graph."""

    def _lay_out(self, users: int) -> None:
        self.users = users
        config, length = self.model.config, self.engine.seq_length
        self.model.set_layout(CellLayout.plan(users, length, length, self.engine.users_per_cell))
        saved = np.zeros((1 if config.is_causal else length, config.hidden_size), np.float32)
        self._saved = Parameter(Tensor(saved), name="saved", requires_grad=False)
        self.kernel_level = library.level()
        wanted, causal = self.engine.prefill_chunk, config.is_causal
        default = device.PREFILL_CHUNK_NATIVE if causal else device.PREFILL_CHUNK_LAYERWISE
        # If prompts cannot be chunked, a step has rows for one of full length.
        room = min(wanted or default, users * length if causal else length)
        self.chunk_length = ChunkLength(room, is_fixed=wanted is not None or not causal)
        # A prompt that cannot be chunked, and is longer than `room`, is prefilled layer by layer.
        self._layerwise = LayerwiseProgress(config.num_layers, room)
        self._all_layers = LayerRange(0, config.num_layers + 1)
        self._height = users + (room if causal else length)
        self._answers = users + device.PROMPT_LOGITS * causal
        self._make_entries()

    def _make_entries(self) -> None:
        self._forward = NativeForward(self.model, self._saved, self._height, self._answers)

    def _jobs(self) -> list[Job]:
        jobs: list[Job] = []
        if self.engine.preallocate_caches:
            for layer in self.model.layer_cells():
                jobs += [("allocate caches", cell.allocate) for cell in layer.attend.kv_past]
        jobs.append(("compile step graph", partial(self._trial_run, 1)))
        if self.users > 1:
            several = min(self.users, INVARIANCE_ROWS)
            jobs.append(("check batch invariance", partial(self._trial_run, several)))
        return jobs

    def _trial_run(self, users: int) -> NDArray[Any]:
        """-> logits of `users` users with the same token, which must be equal."""
        check_shared_memory()
        # The first position, which this writes, is overwritten before it is read.
        rotary = [0] * self.model.rotary.parts
        tokens = [(0, user, 0, 1, *rotary) for user in range(users)]
        plan = [users, users, *self._all_layers]
        results = self._run_tokens(tokens, range(users), users, plan)
        for user in range(users):
            self.trim(user, 0)
        return results.logits(range(users))

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """Prompts in order while there is room; the last one of a causal model is chunked.

        Whole prompts count in the step in which they go through the last layer. Prompts that need
        logits for each token share `PROMPT_LOGITS` rows equally.
        """
        if not self.model.config.is_causal:
            group = self._layerwise.group(prompts)
            is_through = self._layerwise.layers_of(group).last > self.model.config.num_layers
            return [len(request.prompt_token_ids) if is_through else 0 for request in group]
        counts: list[int] = []
        room = self.chunk_length.tokens(decoding)
        scored = sum(request.params.prompt_logprobs is not None for request in prompts)
        for request in prompts:
            if room <= 0:
                break
            count = min(len(request.prompt_token_ids) - request.computed_tokens, room)
            if request.params.prompt_logprobs is not None:
                count = min(count, 1 + device.PROMPT_LOGITS // scored)
            counts.append(count)
            room -= count
        return counts

    def parts(self, step: Step) -> Sequence[Step]:
        """A single graph runs the whole step."""
        return [step] if step.rows else []

    def run(self, step: Step) -> HostResults:
        is_causal = self.model.config.is_causal
        tokens: list[tuple[int, ...]] = []
        for slot, request in step.decodes.items():
            tokens += self._tokens_of(slot, request, 1)
        decode_rows = len(tokens)
        answered = list(range(decode_rows))
        scored: list[int] = []
        for slot, chunk in step.prompts.items():
            whole = len(chunk.request.prompt_token_ids)
            scored += range(len(tokens), len(tokens) + chunk.scored)
            tokens += self._tokens_of(slot, chunk.request, chunk.tokens if is_causal else whole)
            if chunk.is_last:
                answered.append(len(tokens) - 1)
        group = [] if is_causal else [chunk.request for chunk in step.prompts.values()]
        layers = self._layerwise.layers_of(group) if group else self._all_layers
        # Prompts in progress continue from `saved`, at the first layer of `plan`.
        new = decode_rows if layers.first else len(tokens)
        plan = [len(tokens), decode_rows, *layers]
        seconds_before = self.graph_seconds
        results = self._run_tokens(tokens, answered + scored, new, plan)
        seconds = self.graph_seconds - seconds_before
        self.chunk_length.measured(len(tokens) - decode_rows, decode_rows, seconds)
        if group:
            self._layerwise.advance(group, layers)
        return results

    def _tokens_of(self, slot: int, request: Request, count: int) -> Iterator[tuple[int, ...]]:
        """Yields (token id, slot, position, number of positions it sees, rotary positions)."""
        start = request.computed_tokens
        token_ids = request.token_ids(start, start + count)
        positions = range(start, start + count)
        if self.model.config.is_causal:
            for token_id, position in zip(token_ids, positions):
                yield token_id, slot, position, position + 1, position
            return
        prefix = self._positions_of(request)
        for token_id, position in zip(token_ids, positions):
            seen = max(position + 1, prefix.context_length)
            yield (token_id, slot, position, seen, *prefix.at(position))

    def _run_tokens(
        self,
        tokens: Sequence[tuple[int, ...]],
        answered: Sequence[int],
        new: int,
        plan: Sequence[int],
    ) -> HostResults:
        """Runs the graph.

        Args:
            tokens: one tuple of `_tokens_of` per row.
            answered: the rows that get logits.
            new: how many of the rows go through the first layer.
            plan: as in `LayerwisePrefill`.
        """
        forward, count = self._forward, len(answered)
        for row, values in zip(forward.tokens, zip(*tokens)):
            row[: len(values)] = array("i", values)
        forward.control[: 5 + count] = array("i", [new, *plan, *answered])
        forward.control[-1] = count
        start = time.perf_counter()
        forward.step()
        self.graph_seconds += time.perf_counter() - start
        finite = [value == 0 for value in forward.finite[:count].tolist()]
        return HostResults(forward.next_tokens[:count].tolist(), finite, forward.logits)

    def cache_bytes(self, tokens: int) -> int:
        """See `held_bytes`. A prompt of ChatGLM-6B counts once it is complete."""
        engine = self.engine
        return held_bytes(
            self.model.config,
            self.cache_dtype,
            tokens,
            engine.seq_length,
            engine.preallocate_caches,
        )

    def trim(self, slot: int, tokens: int) -> None:
        for cell, row in self.model.caches_of(slot):
            cell.trim(row, tokens)

    def read_slot(self, slot: int, positions: int) -> Iterator[CacheBytes]:
        head_dim = self.model.config.head_dim
        _, of_values = head_sizes(self.cache_dtype, positions, head_dim)
        for memory, used in _heads_of(self.model, slot, positions):
            piece = memory[:used].copy()
            if used > of_values:  # keys, in whole tiles
                clear_last_tile(piece, self.cache_dtype, positions, head_dim)
            yield piece

    def write_slot(self, slot: int, positions: int, pieces: Sequence[CacheBytes]) -> Iterator[None]:
        heads = list(_heads_of(self.model, slot, positions))
        if len(heads) != len(pieces) or any(
            piece.nbytes < used for (_, used), piece in zip(heads, pieces)
        ):
            raise ValueError(f"a session has other pieces than the {len(heads)} of a slot")
        for (memory, used), piece in zip(heads, pieces):
            memory[:used] = piece[:used]
            yield


def _heads_of(model: MultiUserModel, user: int, positions: int) -> Iterator[tuple[CacheBytes, int]]:
    """The memory of each head of a user's caches, which is contiguous, and how many of its bytes
    the first `positions` positions take."""
    for cell, row in model.caches_of(user):
        sizes = cell.sizes(positions=positions)
        for parameter, used in zip((cell.key_past, cell.value_past), sizes):
            for head in memory_of(parameter)[row]:
                yield head.reshape(-1).view(np.uint8), used
