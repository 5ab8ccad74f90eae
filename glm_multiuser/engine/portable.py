"""The portable runner: separate graphs for prompts and decode rows, on any device.

Prompts of ChatGLM-6B are prefilled whole, because their context is bidirectional. Causal models
use chunked prefill. Chunk boundaries depend on the prompt alone, so its bits do not depend on
other requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.backends.cell_layout import BLOCK_LENGTH, CellLayout
from glm_multiuser.backends.portable.types import NUMPY_TYPES
from glm_multiuser.engine.chunk_length import ChunkLength
from glm_multiuser.engine.compile_cache import CompileCache
from glm_multiuser.engine.fingerprint import CACHES
from glm_multiuser.engine.graph_runner import GraphRunner, Job
from glm_multiuser.engine.graph_shapes import (
    MOST_PROMPTS,
    batch_sizes,
    block_counts,
    chunk_lengths,
    prompt_counts,
    prompt_lengths,
)
from glm_multiuser.engine.padding import invariant_rows
from glm_multiuser.engine.portable_graphs import (
    PortableForward,
    ReplaceCache,
    empty_block,
    read_block,
)
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import PromptChunk, Step
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.sessions.session import CacheBytes


@dataclass
class DeviceResults:
    """`RowResults` whose logits are copied from the device only when they are read."""

    tokens: Sequence[int]
    finite: Sequence[bool]
    device_logits: Tensor
    device_rows: Sequence[int]

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        host: NDArray[Any] = self.device_logits.asnumpy()
        return host[[self.device_rows[row] for row in rows]]

    def only(self, rows: Sequence[int]) -> DeviceResults:
        """Some rows of a graph's results, in this order."""
        return DeviceResults(
            [self.tokens[row] for row in rows],
            [self.finite[row] for row in rows],
            self.device_logits,
            [self.device_rows[row] for row in rows],
        )


class PortableRunner(GraphRunner):
    """Separate graphs for prefill and decode; subclasses define prefill."""

    def _lay_out(self, users: int) -> None:
        self.users = users
        length, per_cell = self.engine.seq_length, self.engine.users_per_cell
        self.layout = CellLayout.plan(users, length, BLOCK_LENGTH, per_cell)
        self.model.set_layout(self.layout)
        self._make_entries()
        lengths = set(self.layout.block_lengths)
        zeros = {length: empty_block(self.model, length) for length in lengths}
        self._zeros = [zeros[length] for length in self.layout.block_lengths]
        self._block_counts = block_counts(len(self.layout.block_lengths))
        self._batch_sizes = batch_sizes(self.layout)
        self._rows = {size: size for size in self._batch_sizes}
        self._written_blocks = [0] * users

    def _make_entries(self) -> None:
        self._forward = PortableForward(self.model)
        self._replace_cache = ReplaceCache(self.model)

    def _jobs(self) -> list[Job]:
        # With a single slot, the row count never changes, so no padding is needed.
        if self.engine.batch_invariant and self.users > 1:
            self._rows = invariant_rows(self.model, self._batch_sizes)
        jobs = self._prompt_jobs()
        for block in range(len(self.layout.block_lengths)):
            jobs.append((f"clear block {block}", partial(self._clear, 0, block)))
        for size, blocks in itertools.product(self._batch_sizes, self._block_counts):
            positions = sum(self.layout.block_lengths[:blocks])
            what = f"decode {size} users, {positions} positions"
            jobs.append((what, partial(self._try_decode, size, blocks)))
        return jobs

    def _compile_cache(self) -> CompileCache:
        return CompileCache.of(self.model, self.engine, self.users, self._rows)

    def _try_decode(self, size: int, blocks: int) -> NDArray[Any]:
        """-> logits of a step in which all rows have the same token, which must be equal."""
        rows = self._rows[size]
        users = None if size == self.users else np.arange(size)
        position_ids, nowhere = self._position_ids(rows, {}), np.full(size, -1)
        results = self._run_graph(np.zeros(rows), position_ids, nowhere, users, blocks)
        return results.logits(range(size))

    def _prompt_jobs(self) -> list[Job]:
        """Every prefill graph."""
        raise NotImplementedError

    def _position_ids(self, rows: int, requests: Mapping[int, Request]) -> NDArray[np.int32]:
        """Position ids of the last tokens of requests, by row, for a decode graph of `rows`."""
        raise NotImplementedError

    def parts(self, step: Step) -> Sequence[Step]:
        return step.parts()

    def run(self, step: Step) -> DeviceResults:
        return self.prefill(step.prompts) if step.prompts else self.decode(step.decodes)

    def _run_graph(self, *inputs: Any) -> DeviceResults:
        """-> all rows of the graph's results; array inputs become int32 tensors."""
        start = time.perf_counter()
        tensors = [to_tensor(one) if isinstance(one, np.ndarray) else one for one in inputs]
        tokens, finite, logits = self._forward(*tensors)
        host_tokens = tokens.asnumpy().tolist()
        host_finite = np.isfinite(finite.asnumpy()).tolist()
        self.graph_seconds += time.perf_counter() - start
        return DeviceResults(host_tokens, host_finite, logits, range(len(host_tokens)))

    def prefill(self, prompts: Mapping[int, PromptChunk]) -> DeviceResults:
        """Next tokens of prompts, by slot; result rows are in the order of `prompts`."""
        raise NotImplementedError

    def decode(self, requests: Mapping[int, Request]) -> DeviceResults:
        """One new token for each request, by slot; result rows are in the order of `requests`."""
        size = next(size for size in self._batch_sizes if size >= len(requests))
        everybody = size == self.users
        rows = self._rows[size]
        # In a graph of all users, a user's row is its slot; otherwise rows are assigned in order,
        # and the remaining rows refer to other slots and write nothing.
        slots = list(requests)
        if not everybody:
            others = (slot for slot in range(self.users) if slot not in requests)
            slots += [next(others) for _ in range(size - len(requests))]
        row_of = {slot: slot if everybody else row for row, slot in enumerate(slots)}
        input_ids, positions = np.zeros(rows, np.int32), np.full(size, -1, np.int32)
        requests_by_row = {}
        for slot, request in requests.items():
            row, position = row_of[slot], len(request) - 1
            input_ids[row] = request.output_token_ids[-1]
            positions[row] = position
            requests_by_row[row] = request
            self._will_write(slot, self.layout.blocks_for(position + 1))
        used = self.layout.blocks_for(int(positions.max()) + 1)
        blocks = next(count for count in self._block_counts if count >= used)
        position_ids = self._position_ids(rows, requests_by_row)
        users = None if everybody else np.array(slots)
        results = self._run_graph(input_ids, position_ids, positions, users, blocks)
        return results.only([row_of[slot] for slot in requests])

    def cache_bytes(self, tokens: int) -> int:
        """The whole cache, regardless of `tokens`."""
        caches = [cell for layer in self.model.layer_cells() for cell in layer.attend.kv_past]
        parameters = [one for cell in caches for one in cell.get_parameters()]
        return sum(int(one.nbytes) for one in parameters if one.name.endswith(CACHES)) // self.users

    def trim(self, slot: int, tokens: int) -> None:
        """Nothing: MindSpore does not return memory."""

    def read_slot(self, slot: int, positions: int) -> Iterator[CacheBytes]:
        for block in range(self.layout.blocks_for(positions)):
            yield read_block(self.model, slot, block).reshape(-1).view(np.uint8)

    def write_slot(self, slot: int, positions: int, pieces: Sequence[CacheBytes]) -> Iterator[None]:
        blocks = self._zeros[: self.layout.blocks_for(positions)]
        if any(piece.nbytes != int(zeros.nbytes) for zeros, piece in zip(blocks, pieces)) or len(
            pieces
        ) < len(blocks):
            raise ValueError(f"a session has other pieces than the {len(blocks)} of a slot")
        self._will_write(slot, len(blocks))
        for block, (zeros, piece) in enumerate(zip(blocks, pieces)):
            past = piece.view(NUMPY_TYPES[self.model.backend.dtype]).reshape(zeros.shape)
            self._replace(slot, block, Tensor(past))
            yield
        self._clear_after(slot, len(blocks))

    def _will_write(self, slot: int, blocks: int) -> None:
        """Called before the first `blocks` are written, so that a device error cannot leave unknown
        memory behind."""
        self._written_blocks[slot] = max(self._written_blocks[slot], blocks)

    def _clear_after(self, slot: int, blocks: int) -> None:
        """Clears the blocks of an earlier user after the first `blocks`."""
        for block in range(blocks, self._written_blocks[slot]):
            self._clear(slot, block)
        self._written_blocks[slot] = blocks

    def _clear(self, slot: int, block: int) -> None:
        self._replace(slot, block, self._zeros[block])

    def _replace(self, slot: int, block: int, past: Tensor) -> None:
        self._replace_cache(to_tensor(np.array(slot)), past, block).asnumpy()


def to_tensor(values: NDArray[Any]) -> Tensor:
    return Tensor(values.astype(np.int32), ms.int32)


class WholePrefillRunner(PortableRunner):
    """Prefills whole prompts, several short ones of one padded length at once."""

    def _lay_out(self, users: int) -> None:
        super()._lay_out(users)
        self._prompt_counts = {
            length: prompt_counts(self.layout, length)
            for length in prompt_lengths(self.engine.seq_length)
        }
        self.chunk_length = ChunkLength(self.engine.seq_length, is_fixed=True)
        self._alone: Optional[NDArray[Any]] = None
        """Logits of the last prompt that was run alone."""

    def _prompt_jobs(self) -> list[Job]:
        return [
            (f"prefill {count} x {length}", partial(self._try_prompts, length, count))
            for length, counts in self._prompt_counts.items()
            for count in counts
        ]

    def _try_prompts(self, length: int, count: int) -> None:
        """Disables batching of prompts of this length if it changes their bits."""
        token_ids = (np.arange(length) % self.vocab_size).tolist()
        results = self._run_prompts([0] * count, [token_ids] * count, length)
        rows = results.logits(range(MOST_PROMPTS))
        if count == 1:
            self._alone = rows
        elif self.engine.batch_invariant and not (rows == self._alone).all():
            self._prompt_counts[length] = (1,)

    def _padded_length(self, request: Request) -> int:
        length = len(request.prompt_token_ids)
        return next(padded for padded in self._prompt_counts if padded >= length)

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """Whole prompts: the first one, and those after it that are padded to the same length."""
        length = self._padded_length(prompts[0])
        most = self._prompt_counts[length][-1]
        alike = itertools.takewhile(lambda one: self._padded_length(one) == length, prompts[:most])
        return [len(request.prompt_token_ids) for request in alike]

    def prefill(self, prompts: Mapping[int, PromptChunk]) -> DeviceResults:
        """Whole prompts of one length, by slot; result rows are in the order of `prompts`."""
        requests = {slot: chunk.request for slot, chunk in prompts.items()}
        length = max(self._padded_length(request) for request in requests.values())
        replaced = self.layout.blocks_for(length)
        for slot in requests:
            self._will_write(slot, replaced)
        count = next(size for size in self._prompt_counts[length] if size >= len(requests))
        slots = list(requests)
        # Remaining rows repeat the first prompt, in the same slot.
        slots += slots[:1] * (count - len(slots))
        token_ids = [requests[slot].prompt_token_ids for slot in slots]
        results = self._run_prompts(slots, token_ids, length)
        for slot in requests:
            self._clear_after(slot, replaced)
        return results.only(range(len(requests)))

    def _position_ids(self, rows: int, requests: Mapping[int, Request]) -> NDArray[np.int32]:
        position_ids = np.zeros((2, rows), np.int32)
        for row, request in requests.items():
            position_ids[:, row] = self._positions_of(request).at(len(request) - 1)
        return position_ids

    def _run_prompts(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], length: int
    ) -> DeviceResults:
        input_ids = np.zeros((len(slots), length), np.int32)
        ids, lengths = [], []
        for row, token_ids in enumerate(prompts):
            positions = PrefixPositions.of(token_ids, self.model.config)
            input_ids[row, : len(token_ids)] = token_ids
            ids.append(positions.ids(0, length))
            lengths.append((positions.context_length, len(token_ids)))
        position_ids, users = np.concatenate(ids, 1), np.array(slots)
        return self._run_graph(input_ids.reshape(-1), position_ids, np.array(lengths), users, 0)


class ChunkedPrefillRunner(PortableRunner):
    """Chunked prefill, which skips the cached prefix."""

    def _lay_out(self, users: int) -> None:
        super()._lay_out(users)
        self._chunk_lengths = chunk_lengths(self.engine)
        self.chunk_length = ChunkLength(self._chunk_lengths[-1], is_fixed=True)

    def _prompt_jobs(self) -> list[Job]:
        jobs: list[Job] = []
        for length, blocks in itertools.product(self._chunk_lengths, self._block_counts):
            positions = sum(self.layout.block_lengths[:blocks])
            what = f"prefill {length} tokens, {positions} positions"
            jobs.append((what, partial(self._try_chunk, length, blocks)))
        return jobs

    def _try_chunk(self, length: int, blocks: int) -> None:
        # This writes position 0, which the first chunk of any prompt replaces.
        self._run_chunk(0, [0], 0, length, blocks)

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """The next chunk of the first prompt; a single token if logits are needed for each."""
        request = prompts[0]
        rest = len(request.prompt_token_ids) - request.computed_tokens
        longest = self._chunk_lengths[-1] if request.params.prompt_logprobs is None else 1
        return [min(rest, longest)]

    def prefill(self, prompts: Mapping[int, PromptChunk]) -> DeviceResults:
        """The next chunk of one request, by slot; returns the result of its last token."""
        ((slot, chunk),) = prompts.items()
        start = chunk.request.computed_tokens
        token_ids = chunk.request.prompt_token_ids[start : start + chunk.tokens]
        length = next(length for length in self._chunk_lengths if length >= len(token_ids))
        used = self.layout.blocks_for(start + len(token_ids))
        blocks = next(count for count in self._block_counts if count >= used)
        self._will_write(slot, blocks)
        results = self._run_chunk(slot, token_ids, start, length, blocks)
        self._clear_after(slot, blocks)
        return results.only([0])

    def _position_ids(self, rows: int, requests: Mapping[int, Request]) -> NDArray[np.int32]:
        position_ids = np.zeros(rows, np.int32)
        for row, request in requests.items():
            position_ids[row] = len(request) - 1
        return position_ids

    def _run_chunk(
        self, slot: int, token_ids: Sequence[int], start: int, length: int, blocks: int
    ) -> DeviceResults:
        input_ids = np.zeros(length, np.int32)
        input_ids[: len(token_ids)] = token_ids
        position_ids = np.minimum(np.arange(start, start + length), self.engine.seq_length - 1)
        positions = np.array([[start, len(token_ids)]])
        return self._run_graph(input_ids, position_ids, positions, np.array(slot), blocks)
