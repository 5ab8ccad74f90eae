"""A numpy language model with memory per slot, like the graphs.

The content of a slot determines the next token: the logits are a hash of the tokens written into
that slot, read back from its memory. So a token in the wrong slot, at the wrong position or written
twice, and any data of an earlier user, changes an answer.

Unused memory is NaN, so reading it fails visibly.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, Optional

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.engine.chunk_length import ChunkLength
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step import PromptChunk, Step
from glm_multiuser.progress import Progress

VOCAB = 50
SEQ_LENGTH = 96
BYTES_PER_TOKEN = 8
EOS = 0
FAILS_AT_ONCE = VOCAB - 1
"""A prompt with this token gets NaN from its prefill."""
FAILS_LATER = VOCAB - 2
"""A prompt with this token gets NaN instead of its fourth token."""

Memory = NDArray[np.float64]


@dataclass(frozen=True)
class Call:
    """One call of the runner: "prefill", "decode", "mixed", "save", "restore" or "resize"."""

    kind: str
    requests: dict[int, Request]
    """By slot."""
    users: int = 0
    slot: Optional[int] = None
    """That is saved or restored."""


@dataclass
class MockResults:
    """`RowResults` that record the requested rows."""

    all_logits: NDArray[np.float32]

    def __post_init__(self) -> None:
        self.tokens: Sequence[int] = np.nan_to_num(self.all_logits).argmax(axis=1).tolist()
        self.finite: Sequence[bool] = np.isfinite(self.all_logits).all(axis=1).tolist()

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        return self.all_logits[list(rows)]


class MockRunner:
    """Implements `engine.runner.Runner`.

    Args:
        users: slots.
        before: called before each call is executed; may block, or raise a device error.
        most_prompts: maximum number of short prompts per call.
        chunk: prompt tokens per call, after the slot's cached tokens, as for a causal model; None:
            whole prompts.

    Attributes:
        calls: every call so far.
        threads: the calling threads.
    """

    vocab_size = VOCAB
    batch_invariant = True
    kernels = "portable"
    kernel_level = ""
    weight_dtype = "float32"
    cache_dtype = "float32"
    compile_seconds = 0.0
    graph_seconds = 0.0
    cache_bytes_per_user = SEQ_LENGTH * BYTES_PER_TOKEN

    def __init__(
        self,
        users: int,
        before: Callable[[Call], None] = lambda call: None,
        most_prompts: int = 1,
        chunk: Optional[int] = None,
    ) -> None:
        self.before = before
        self.chunk = chunk
        self.chunk_length = ChunkLength(chunk or SEQ_LENGTH, is_fixed=True)
        self.model = SimpleNamespace(config=SimpleNamespace(is_causal=chunk is not None))
        self.most_prompts = most_prompts
        self.calls: list[Call] = []
        self.threads: set[int] = set()
        self.compiles = 3
        self.closed = False
        self._in_use = threading.Lock()
        self._new: set[int] = set()
        """Slots prefilled since the last decode call, so not yet part of one."""
        self._lay_out(users)

    def _lay_out(self, users: int) -> None:
        self.memory: Memory = np.full((users, SEQ_LENGTH), np.nan)

    def requests_of(self, *kinds: str) -> list[Request]:
        """The requests in calls of these kinds, in order."""
        calls = [call for call in self.calls if call.kind in kinds]
        return [request for call in calls for request in call.requests.values()]

    def count(self, kind: str) -> int:
        """The number of calls of this kind."""
        return sum(call.kind == kind for call in self.calls)

    def _enter(self, call: Call) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())
        self.before(call)

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        """Prompts of similar length are prefilled together, more of the shorter ones."""
        if self.chunk is not None:
            rest = len(prompts[0].prompt_token_ids) - prompts[0].computed_tokens
            return [min(self.chunk, rest)]
        lengths = [len(request.prompt_token_ids) for request in prompts]
        most = self.most_prompts if lengths[0] < 8 else 1
        alike = itertools.takewhile(lambda one: one // 4 == lengths[0] // 4, lengths[:most])
        return list(alike)

    def parts(self, step: Step) -> Sequence[Step]:
        return step.parts()

    def run(self, step: Step) -> MockResults:
        return self.prefill(step.prompts) if step.prompts else self.decode(step.decodes)

    def prefill(self, prompts: Mapping[int, PromptChunk]) -> MockResults:
        with self._alone():
            self._enter(Call("prefill", {slot: piece.request for slot, piece in prompts.items()}))
            rows = []
            for slot, piece in prompts.items():
                request = piece.request
                start = request.computed_tokens
                end = start + piece.tokens
                chunk = written(request.prompt_token_ids[start:end])
                self._overwrite(slot, np.concatenate((self.memory[slot, :start], chunk)))
                if piece.is_last:
                    rows.append(self._logits(slot, request, end))
            return MockResults(in_rows([*rows, *self._scored(prompts)]))

    def decode(self, requests: Mapping[int, Request]) -> MockResults:
        with self._alone():
            self._enter(Call("decode", dict(requests)))
            if self.chunk is None:
                # Every running request is in every step: slots neither here nor new are free.
                others = {*range(len(self.memory))} - {*requests} - self._new
                self.memory[list(others)] = np.nan
            self._new = set()
            rows = []
            for slot, request in requests.items():
                position = len(request) - 1
                # As the graph does: added to a position that must still be zero.
                self.memory[slot, position] += written(request.output_token_ids[-1:])[0]
                rows.append(self._logits(slot, request, position + 1))
            return MockResults(np.stack(rows))

    def read_slot(self, slot: int, positions: int) -> Iterator[NDArray[np.uint8]]:
        with self._alone():
            self._enter(Call("save", {}, slot=slot))
        for position in range(positions):
            yield self.memory[slot, position : position + 1].copy().view(np.uint8)

    def write_slot(
        self, slot: int, positions: int, pieces: Sequence[NDArray[np.uint8]]
    ) -> Iterator[None]:
        with self._alone():
            self._enter(Call("restore", {}, slot=slot))
        if len(pieces) < positions or any(piece.nbytes != 8 for piece in pieces):
            raise ValueError("other pieces")
        for position in range(positions):
            self.memory[slot, position] = pieces[position].view(np.float64)[0]
            yield
        self._overwrite(slot, self.memory[slot, :positions].copy())

    def slot_bytes(self, positions: int) -> int:
        return 8 * positions

    def fingerprint(self) -> str:
        return "5" * 32

    def cache_bytes(self, tokens: int) -> int:
        return tokens * BYTES_PER_TOKEN

    def trim(self, slot: int, tokens: int) -> None:
        """Freed memory must not be read again."""
        self.memory[slot, tokens:] = np.nan

    def recover(self) -> None:
        pass

    def resize(self, users: int, progress: Progress) -> None:
        with self._alone():
            self._new = set()
            self._lay_out(users)  # before anything can fail: what the slots held is gone
            self._enter(Call("resize", {}, users))
            progress(0, 1, "mock")
            self.compiles += 3

    def close(self) -> None:
        self.closed = True

    def _alone(self) -> _NotReentrant:
        return _NotReentrant(self._in_use)

    def _overwrite(self, slot: int, content: Memory) -> None:
        self._new.add(slot)
        self.memory[slot] = 0.0
        self.memory[slot, : len(content)] = content

    def _scored(self, prompts: Mapping[int, PromptChunk]) -> Iterator[NDArray[np.float32]]:
        """The rows of `Step.scored`, of chunks that are in the slots."""
        for slot, piece in prompts.items():
            start = piece.request.computed_tokens + 1
            for length in range(start, start + piece.scored):
                yield self._logits(slot, piece.request, length)

    def _logits(self, slot: int, request: Request, length: int) -> NDArray[np.float32]:
        held = self.memory[slot, :length]
        prompt, generated = request.prompt_token_ids, len(request.output_token_ids)
        if FAILS_AT_ONCE in prompt or (FAILS_LATER in prompt and generated == 3):
            self.memory[slot] = np.nan
        if not np.isfinite(held).all():
            return np.full(VOCAB, np.nan, np.float32)
        return hashed_logits(held)


def in_rows(logits: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """[rows, VOCAB], possibly without rows."""
    return np.stack(logits) if logits else np.zeros((0, VOCAB), np.float32)


def hashed_logits(content: Memory) -> NDArray[np.float32]:
    """This "model's" logits for a slot's content."""
    random = np.random.default_rng(zlib.crc32(content.tobytes()))
    logits: NDArray[np.float32] = random.standard_normal(VOCAB, dtype=np.float32) * np.float32(3)
    return logits


def written(token_ids: Sequence[int]) -> Memory:
    """Offset by one, so that token 0 leaves a trace."""
    return np.array(token_ids, np.float64) + 1


class _NotReentrant:
    """Fails if two threads are in the runner at once."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise AssertionError("two threads called the runner at once")

    def __exit__(self, *error: object) -> None:
        self.lock.release()


class Gate:
    """Blocks the runner before each call, until the test releases it.

    Pass it to `MockRunner` as `before`.
    """

    PATIENCE = 180.0
    """Timeout in seconds for tests that would hang."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._open = threading.Event()
        self._held: Optional[Call] = None

    def __call__(self, call: Call) -> None:
        if self._open.is_set():
            return
        self._held = call
        self._arrived.release()
        assert self._go.acquire(timeout=self.PATIENCE), f"{call} was not released"

    def wait(self) -> Call:
        """Waits for a call at the gate and returns it."""
        assert self._arrived.acquire(timeout=self.PATIENCE), "no call came to the gate"
        assert self._held is not None
        return self._held

    def let_pass(self) -> None:
        """Releases the call that `wait` returned."""
        self._go.release()

    def open(self) -> None:
        """Opens the gate for good."""
        self._open.set()
        self._go.release()
