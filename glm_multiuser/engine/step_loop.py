"""The step loop: schedule -> run -> sample -> deliver, on the device thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

from glm_multiuser.engine.prompt_logprobs import not_finite, score
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import RowResults, Runner
from glm_multiuser.engine.scheduler import Scheduler
from glm_multiuser.engine.slot_sessions import SlotSessions
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.step import Step
from glm_multiuser.errors import EngineClosedError, GenerationError, GLMMultiUserError
from glm_multiuser.progress import Progress
from glm_multiuser.sampling import Choice, choose
from glm_multiuser.sessions.store import SessionStore

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """Totals since the engine was created."""

    steps: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One completed step.

    Attributes:
        kind: "prefill", "decode", or "mixed" if one graph did both.
        rows: number of requests that took part.
        seconds: from the start of its graph until the last token was delivered.
    """

    kind: str
    rows: int
    seconds: float


Chosen = Union[Choice, GenerationError]
"""The next token of a row, or an error."""

FAILED_STEPS_MAX = 3
"""After this many consecutive failed steps, the engine closes."""


class StepLoop:
    """Runs the requests of one model, one step at a time.

    Args:
        runner: runs the graphs.
        users: number of slots.
        reuse: whether the prefix cache of the user's slot is used; for causal models only.
        cache_limit: maximum of bytes for all caches; None: unlimited.
        store: keeps sessions of evicted users.

    Attributes:
        failure: the error that made the engine close; None otherwise.
        on_step: called after every step on the device thread; must return immediately, not raise.
    """

    def __init__(
        self,
        runner: Runner,
        users: int,
        reuse: bool,
        cache_limit: Optional[int],
        store: SessionStore,
    ) -> None:
        self.runner = runner
        self.cache_limit = cache_limit
        self.counters = Counters()
        self.sessions = SlotSessions(runner, store, reuse)
        self.failure: Optional[Exception] = None
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self._step_seconds = 0.0
        self._failed_steps = 0
        self._scheduler = self._new_scheduler(users)
        self._lock = threading.Condition()
        """Guards the scheduler's queue, which other threads add to, and `_closing`."""
        self._closing = False
        self._queue_has_cancelled = False
        """Whether the queue may have cancelled requests. A plain flag, because finalizers set it,
        which must not wait for a lock."""

    def _new_scheduler(self, users: int) -> Scheduler:
        return Scheduler(self._new_slots(users), self.runner.chunk_sizes, self.sessions)

    def _new_slots(self, users: int) -> Slots:
        sessions = self.sessions
        return Slots(
            users, self.runner.cache_bytes, self.cache_limit, sessions.may_evict, sessions.drop
        )

    def step(self) -> bool:
        """One iteration of the loop; returns whether there was anything to do.

        An unexpected error closes this engine, but does not affect others in the process.
        """
        try:
            return self._step()
        except Exception as error:  # a bug: the state can no longer be trusted
            logger.exception("the engine closes: its step loop failed")
            self._fail(error)
            return False

    def _step(self) -> bool:
        self._drop_cancelled()
        with self._lock:
            step = self._scheduler.schedule()
            if step is None:
                self._scheduler.check()
        for slot, tokens in step.trimmed.items() if step is not None else ():
            self.runner.trim(slot, tokens)
        copied = self._copy_sessions(step)
        if step is None:
            return copied
        for slot, request in step.returning.items():
            self._put_back(slot, request)
        for part in self.runner.parts(step):
            start = time.perf_counter()
            self._run(part)
            seconds = time.perf_counter() - start
            self.counters.steps += 1
            self.counters.step_seconds += seconds
            self._step_seconds = seconds
            kind = ("mixed" if part.decodes else "prefill") if part.prompts else "decode"
            self.on_step(StepReport(kind, part.rows, seconds))
        return True

    def _copy_sessions(self, step: Optional[Step]) -> bool:
        """Copies sessions for a limited time; returns whether there was anything to copy."""
        seconds = self._step_seconds if step is not None and step.decodes else None
        copied, restored = self.sessions.work(seconds)
        for slot in restored:
            self._scheduler.restored(slot)
        return copied

    def _put_back(self, slot: int, request: Request) -> None:
        saved, request.saved_past = request.saved_past or (), None
        try:
            for _ in self.runner.write_slot(slot, request.computed_tokens, saved):
                pass
        except Exception as error:  # anything the device or MindSpore may raise
            self._device_failed({slot: request}, error)

    def _run(self, step: Step) -> None:
        """Runs one graph, samples the next token of every row, and delivers it.

        A prompt that is not complete has no next token; its log-probabilities are recorded if
        requested. A device error ends the requests of this graph and no others.

        Raises:
            GenerationError: `FAILED_STEPS_MAX` consecutive graphs have failed.
        """
        answered, scored = step.answered, step.scored
        try:
            results = self.runner.run(step)
            failed = score(results, len(answered), scored) if scored else {}
            self._count(step)
            choices = _choose(results, list(answered.values()))
        except Exception as error:  # anything the device or MindSpore may raise
            self._device_failed(step.requests, error)
            return
        self._failed_steps = 0
        for slot, choice in {**dict(zip(answered, choices)), **failed}.items():
            self._hand_out(slot, choice)

    def _count(self, step: Step) -> None:
        """Updates token counts after a step."""
        for chunk in step.prompts.values():
            chunk.request.computed_tokens += chunk.tokens
            self.counters.prompt_tokens += chunk.tokens
        for request in step.decodes.values():
            request.computed_tokens += 1
        self.counters.decode_steps += bool(step.decodes)
        self.counters.decode_rows += len(step.decodes)

    def _device_failed(self, requests: Mapping[int, Request], error: Exception) -> None:
        logger.exception("a step with %d requests failed", len(requests))
        for slot in requests:
            failure = GenerationError(f"the device failed in this request's step: {error}")
            self._finish(slot, "error", failure)
        self._failed_steps += 1
        if self._failed_steps >= FAILED_STEPS_MAX:
            raise GenerationError(
                f"the device failed in {self._failed_steps} steps in a row: {error}"
            ) from error
        self.runner.recover()

    def _hand_out(self, slot: int, choice: Chosen) -> None:
        if isinstance(choice, GenerationError):
            self._finish(slot, "error", choice)
            return
        self.counters.generated_tokens += 1
        finish_reason = self._scheduler.running[slot].accept(choice)
        if finish_reason is not None:
            self._finish(slot, finish_reason)

    def _finish(
        self, slot: int, finish_reason: str, error: Optional[GLMMultiUserError] = None
    ) -> None:
        with self._lock:
            request = self._scheduler.finish(slot, failed=error is not None)
            held = len(self._scheduler.slots.held(request.holder))
            self._lock.notify_all()
        if not held or held < request.resident_tokens:
            self.runner.trim(slot, held)
        request.end(finish_reason, error)

    def _drop_cancelled(self) -> None:
        if self._queue_has_cancelled:
            self._queue_has_cancelled = False  # before the search: more may be cancelled meanwhile
            self._drop_waiting()
        running = self._scheduler.running
        for slot in [slot for slot, request in running.items() if request.cancelled]:
            self._finish(slot, "cancelled")

    def _drop_waiting(self) -> None:
        with self._lock:
            waiting = [request for request in self._scheduler.waiting if request.cancelled]
            for request in waiting:
                self._scheduler.waiting.remove(request)
            if waiting:
                self._lock.notify_all()
        for request in waiting:
            request.end("cancelled")

    def _resize(self, users: int, progress: Progress) -> None:
        if self._closing:
            raise EngineClosedError("the engine is closed; its size cannot change")
        self._drop_cancelled()  # their sessions are saved with those of other idle users
        running, old_users = self._scheduler.running, self._scheduler.slots.count
        # Before anything changes, because there may not be enough memory for it.
        saved = {
            slot: list(self.runner.read_slot(slot, request.computed_tokens))
            for slot, request in running.items()
        }
        self.sessions.flush()
        for slot, past in saved.items():
            running[slot].saved_past = past
        with self._lock:
            self._scheduler.pause(self._new_slots(users))
            self._queue_has_cancelled = True  # a paused request may be
            self._lock.notify_all()  # more slots may mean more room in the queue
        try:
            self.runner.resize(users, progress)
        except BaseException:
            self._go_back(old_users)
            raise

    def _go_back(self, users: int) -> None:
        """After a failed resize: restores the old size, or closes the engine."""
        with self._lock:
            self._scheduler.pause(self._new_slots(users))
        try:
            self.runner.resize(users, lambda done, total, what: None)
        except Exception as error:
            logger.exception("the engine closes: it could not go back to %d users", users)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends every request and closes the engine."""
        one: Optional[BaseException] = error
        while one is not None:  # frames of tracebacks would keep the engine's caches alive
            one.__traceback__, one = None, one.__cause__ or one.__context__
        with self._lock:
            self.failure = error
            requests = self._accepted()
            self.sessions.reset()
            self._scheduler = self._new_scheduler(self._scheduler.slots.count)
            self._closing = True
            self._lock.notify_all()
        for request in requests:
            request.end("error", GenerationError(f"the engine failed and is closed: {error}"))

    def _accepted(self) -> list[Request]:
        return [*self._scheduler.waiting, *self._scheduler.running.values()]

    def _is_empty(self) -> bool:
        return not self._accepted()


def _choose(results: RowResults, requests: Sequence[Request]) -> list[Chosen]:
    """The next token of each row; only rows for which argmax does not suffice are sampled."""
    chosen = [
        _argmax(request, token) if finite else not_finite()
        for token, finite, request in zip(results.tokens, results.finite, requests)
    ]
    rows = [row for row, choice in enumerate(chosen) if choice is None]
    if rows:
        samplers = [requests[row].sampler for row in rows]
        for row, choice in zip(rows, choose(results.logits(rows), samplers)):
            chosen[row] = not_finite() if choice is None else choice
    return [one for one in chosen if one is not None]


def _argmax(request: Request, token: int) -> Optional[Chosen]:
    """The graph's token if the request needs no logits, or an error; None if it must be sampled."""
    try:
        return None if request.sampler.needs_logits(token) else Choice(token, None, None)
    except GenerationError as error:
        return error
