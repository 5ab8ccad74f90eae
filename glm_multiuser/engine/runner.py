"""Rows -> tensors -> graph -> logits; the only room of the engine that calls the device.

Every method runs on the device thread.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.config import BLOCK_LENGTH, EngineConfig, prompt_lengths
from glm_multiuser.engine.padding import invariant_rows
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import PromptGroup
from glm_multiuser.models.graphs import Forward, ReplacePast, read_past, zero_past
from glm_multiuser.models.kv_past import CellLayout
from glm_multiuser.models.modeling_glm import MOST_PROMPTS, GLMForMultiUser
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.progress import Progress

SMALLEST_BATCH = 4

PROMPT_ROWS = 64
"""Prompts enter together up to so many rows: beyond them little more is saved."""


class RowResults(Protocol):
    """What a graph says about the next token of some rows."""

    tokens: NDArray[Any]
    """int32 [rows]: the most likely next token of each."""
    finite: NDArray[Any]
    """bool [rows]: whether everything that led to it was finite."""

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        """float32 [len(rows), vocab_size], brought to the host only when asked for."""


class Runner(Protocol):
    """What the engine needs of a model; tests put a mock in its place."""

    vocab_size: int

    def prompt_group(self, request: Request) -> PromptGroup: ...

    def prefill(self, requests: Mapping[int, Request]) -> RowResults: ...

    def decode(self, requests: Mapping[int, Request]) -> RowResults: ...

    def save(self, slot: int, request: Request) -> Any: ...

    def restore(self, slot: int, request: Request, saved: Any) -> None: ...

    def resize(self, users: int, progress: Progress) -> None: ...

    def close(self) -> None: ...

    @property
    def compiles(self) -> int: ...


@dataclass
class DeviceResults:
    """`RowResults` whose logits stay on the device until somebody asks for them."""

    tokens: NDArray[Any]
    finite: NDArray[Any]
    device_logits: Tensor
    device_rows: Sequence[int]

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        host: NDArray[Any] = self.device_logits.asnumpy()
        return host[[self.device_rows[row] for row in rows]]


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


def prompt_counts(layout: CellLayout, length: int) -> tuple[int, ...]:
    """How many prompts of one length the prefill graphs take in: one, and as many as pay.

    The second is a power of two, at most `MOST_PROMPTS`, and needs a cell that holds everybody.
    """
    if len(layout.sizes) > 1:
        return (1,)
    most = min(PROMPT_ROWS // length, layout.users, MOST_PROMPTS)
    return (1, 1 << most.bit_length() - 1) if most > 1 else (1,)


class GraphRunner:
    """Runs a model's graphs for an engine.

    Args:
        model: with its weights; its caches are laid out here.
        engine: users, sequence length, users per cell.
    """

    def __init__(self, model: GLMForMultiUser, engine: EngineConfig) -> None:
        self.model = model
        self.engine = engine
        self.vocab_size = model.config.vocab_size
        self.graph_seconds = 0.0
        self.compile_seconds = 0.0
        self.batch_invariant = True
        self._retired_compiles = 0
        self._lay_out(engine.users)

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
        self._prompt_counts = {
            length: prompt_counts(self.layout, length)
            for length in prompt_lengths(self.engine.seq_length)
        }
        self._block_counts = block_counts(len(self.layout.block_lengths))
        self._batch_sizes = batch_sizes(self.layout)
        self._rows = {size: size for size in self._batch_sizes}
        self._written_blocks = [0] * users
        self._positions: dict[int, PrefixPositions] = {}
        self._alone: Optional[NDArray[Any]] = None
        """Logits of the last prompt that was tried by itself."""

    @property
    def compiles(self) -> int:
        """Graphs compiled so far."""
        entries = [entry for entry in (self._forward, self._replace_past) if entry is not None]
        return self._retired_compiles + sum(len(entry.compile_cache) for entry in entries)

    @property
    def cache_bytes_per_user(self) -> int:
        """Keys and values of all layers and positions."""
        config = self.model.config
        itemsize = np.dtype(self.model.numerics.compute).itemsize
        return 2 * config.num_layers * self.engine.seq_length * config.hidden_size * itemsize

    def compile(self, progress: Progress) -> None:
        """Compiles and runs every graph once, with rows that write nothing."""
        start, graph_seconds = time.monotonic(), self.graph_seconds
        # A single slot has nobody to share with and may use the faster one-row product.
        if self.engine.batch_invariant and self.users > 1:
            self._rows = invariant_rows(self.model.linears(), self._batch_sizes)
        jobs: list[tuple[str, Callable[[], Any]]] = []
        for length, counts in self._prompt_counts.items():
            for count in counts:
                jobs.append(
                    (f"prefill {count} x {length}", partial(self._try_prompts, length, count))
                )
        for block in range(len(self.layout.block_lengths)):
            jobs.append((f"clear block {block}", partial(self._clear, 0, block)))
        for size, blocks in itertools.product(self._batch_sizes, self._block_counts):
            positions = sum(self.layout.block_lengths[:blocks])
            what = f"decode {size} users, {positions} positions"
            jobs.append((what, partial(self._try_decode, size, blocks)))
        rows: list[NDArray[Any]] = []
        for done, (what, job) in enumerate(jobs):
            progress(done, len(jobs), what)
            logits = job()
            if logits is not None:
                rows.extend(logits)
        progress(len(jobs), len(jobs), "ready")
        self.batch_invariant = all((row == rows[0]).all() for row in rows)
        self.compile_seconds = time.monotonic() - start
        self.graph_seconds = graph_seconds

    def _try_prompts(self, length: int, count: int) -> None:
        """Gives up taking in several prompts at once where that changes their bits."""
        token_ids = (np.arange(length) % self.vocab_size).tolist()
        rows = self._run_prompts([0] * count, [token_ids] * count, length)[2].asnumpy().copy()
        if count == 1:
            self._alone = rows
        elif self.engine.batch_invariant and not (rows == self._alone).all():
            self._prompt_counts[length] = (1,)

    def _try_decode(self, size: int, blocks: int) -> NDArray[Any]:
        """-> logits of a step in which every row holds the same token: rows that must be equal."""
        rows = self._rows[size]
        results = self._run_decode(
            np.zeros(rows), np.zeros((2, rows)), np.full(size, -1), np.arange(size), blocks
        )
        logits: NDArray[Any] = results[2].asnumpy()
        return logits[:size].copy()

    def _padded_length(self, request: Request) -> int:
        length = len(request.prompt_token_ids)
        return next(padded for padded in self._prompt_counts if padded >= length)

    def prompt_group(self, request: Request) -> PromptGroup:
        """Prompts that are padded to one length enter together, as many as a graph takes in."""
        length = self._padded_length(request)
        return length, self._prompt_counts[length][-1]

    def prefill(self, requests: Mapping[int, Request]) -> DeviceResults:
        """Whole prompts of one group, by slot; result rows in the order of `requests`."""
        length = max(self._padded_length(request) for request in requests.values())
        replaced = self.layout.blocks_for(length)
        for slot in requests:
            # Before the graph runs, so that a device error cannot leave unknown memory behind.
            self._written_blocks[slot] = max(self._written_blocks[slot], replaced)
        count = next(size for size in self._prompt_counts[length] if size >= len(requests))
        slots = list(requests)
        # What is left over brings the first prompt again, to the same place.
        slots += slots[:1] * (count - len(slots))
        prompts = [requests[slot].prompt_token_ids for slot in slots]
        tokens, finite, logits = self._run_prompts(slots, prompts, length)
        for slot in requests:
            self._clear_behind(slot, replaced)
        rows = range(len(requests))
        return DeviceResults(tokens[: len(rows)], finite[: len(rows)], logits, rows)

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
        input_ids, position_ids = np.zeros(rows, np.int32), np.zeros((2, rows), np.int32)
        positions = np.full(size, -1, np.int32)
        for slot, request in requests.items():
            row, position = row_of[slot], len(request) - 1
            input_ids[row] = request.output_token_ids[-1]
            position_ids[:, row] = self._positions[slot].ids(position, position + 1)[:, 0]
            positions[row] = position
            used = self.layout.blocks_for(position + 1)
            self._written_blocks[slot] = max(self._written_blocks[slot], used)
        used = self.layout.blocks_for(int(positions.max()) + 1)
        blocks = next(count for count in self._block_counts if count >= used)
        tokens, finite, logits = self._run_decode(
            input_ids, position_ids, positions, np.array(slots, np.int32), blocks
        )
        order = [row_of[slot] for slot in requests]
        return DeviceResults(tokens[order], finite[order], logits, order)

    def save(self, slot: int, request: Request) -> list[NDArray[Any]]:
        """Copies a slot's keys and values to the host, block by block."""
        blocks = self.layout.blocks_for(len(request))
        return [read_past(self.model, slot, block) for block in range(blocks)]

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        """Puts into a slot what `save` copied out of this or another one."""
        self._written_blocks[slot] = max(self._written_blocks[slot], len(saved))
        for block, past in enumerate(saved):
            self._replace(slot, block, Tensor(past))
        self._clear_behind(slot, len(saved))
        self._positions[slot] = PrefixPositions.of(request.prompt_token_ids, self.model.config)

    def resize(self, users: int, progress: Progress) -> None:
        """Lays the caches out for another number of users; what they held is gone."""
        self.close()  # the old graphs go before their successors come
        self._lay_out(users)
        self.compile(progress)

    def close(self) -> None:
        """Lets go of the graphs; what frees them is a call to MindSpore too."""
        self._retired_compiles = self.compiles
        self._forward = self._replace_past = None
        gc.collect()

    def _clear_behind(self, slot: int, blocks: int) -> None:
        """Makes what an earlier user wrote behind the first `blocks` new memory."""
        for block in range(blocks, self._written_blocks[slot]):
            self._clear(slot, block)
        self._written_blocks[slot] = blocks

    def _clear(self, slot: int, block: int) -> None:
        self._replace(slot, block, self._zeros[block])

    def _replace(self, slot: int, block: int, past: Tensor) -> None:
        self._replace_past(to_tensor(np.array(slot)), past, block).asnumpy()

    def _run_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        input_ids = np.zeros((len(slots), length), np.int32)
        position_ids, lengths = [], []
        for row, (slot, token_ids) in enumerate(zip(slots, prompts)):
            positions = PrefixPositions.of(token_ids, self.model.config)
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
        start = time.perf_counter()
        tokens, finite, logits = self._forward(
            to_tensor(input_ids),
            to_tensor(position_ids),
            to_tensor(positions),
            None if users is None else to_tensor(users),
            blocks,
        )
        host_tokens, host_finite = tokens.asnumpy(), np.isfinite(finite.asnumpy())
        self.graph_seconds += time.perf_counter() - start
        return host_tokens, host_finite, logits


def to_tensor(values: NDArray[Any]) -> Tensor:
    return Tensor(values.astype(np.int32), ms.int32)
