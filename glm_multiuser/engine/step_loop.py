"""The step loop: schedule -> run -> sample -> hand out. All of it is on the device thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional, Union

from glm_multiuser.engine.prompt_logprobs import not_finite, score
from glm_multiuser.engine.request import AnonymousUser, Request
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
    """What the engine has done since it was made."""

    steps: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """One step that was run.

    Attributes:
        kind: "prefill", "decode", or "mixed" where one graph does both.
        rows: requests that took part.
        seconds: of its graph, up to the last token handed out.
    """

    kind: str
    rows: int
    seconds: float


Chosen = Union[Choice, GenerationError]
"""The next token of a row, or why there is none."""

FAILED_STEPS_MAX = 3
"""After so many steps in a row that the device could not run, the engine closes."""


class StepLoop:
    """Runs the requests of one model, one step at a time.

    Args:
        runner: runs the graphs.
        users: slots.
        reuse: whether the prefix cache of the user's slot is used; for causal models only.
        cache_limit: bytes that all caches together may take; None: any.
        store: keeps sessions whose slot was taken.

    Attributes:
        failure: what made the engine close by itself; None as long as it has not.
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
        self._reuse = reuse
        self._step_seconds = 0.0
        self._failed_steps = 0
        self._scheduler = self._new_scheduler(users)
        self._lock = threading.Condition()
        """Guards the scheduler's queue, which other threads add to, and `_closing`."""
        self._closing = False

    def _new_scheduler(self, users: int) -> Scheduler:
        slots = self._new_slots(users)
        return Scheduler(slots, self.runner.chunk_sizes, self._reuse, self.sessions)

    def _new_slots(self, users: int) -> Slots:
        return Slots(users, self.runner.cache_bytes, self.cache_limit)

    def step(self) -> bool:
        """One turn of the loop; returns whether there was anything to do.

        An error that nothing below expects closes this engine, and leaves the others of the
        process alone.
        """
        try:
            return self._step()
        except Exception as error:  # a defect: what it left behind cannot be trusted
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
        """Copies for a while, beside those who run; returns whether there was anything to copy."""
        seconds = self._step_seconds if step is not None and step.decodes else None
        copied, restored = self.sessions.work(seconds)
        for slot in restored:
            self._scheduler.restored(slot)
        return copied

    def _put_back(self, slot: int, request: Request) -> None:
        saved, request.saved_past = request.saved_past, None
        try:
            self.runner.restore(slot, request, saved)
        except Exception as error:  # whatever the device or MindSpore throws
            self._device_failed({slot: request}, error)

    def _run(self, step: Step) -> None:
        """Runs one graph, chooses the next token of every row and hands it out.

        A prompt that is not wholly in has no next token; its log-probabilities are recorded where
        they are wanted. A device error ends the requests of this graph and no others.

        Raises:
            GenerationError: `FAILED_STEPS_MAX` graphs in a row have failed: the device is gone.
        """
        answered, scored = step.answered, step.scored
        try:
            results = self.runner.run(step)
            failed = score(results, len(answered), scored) if scored else {}
            self._count(step)
            choices = _choose(results, list(answered.values()))
        except Exception as error:  # whatever the device or MindSpore throws
            self._device_failed(step.requests, error)
            return
        self._failed_steps = 0
        for slot, choice in {**dict(zip(answered, choices)), **failed}.items():
            self._hand_out(slot, choice)

    def _count(self, step: Step) -> None:
        """What the slots hold now."""
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
            # A failed slot is not kept for its user.
            anonymous = isinstance(self._scheduler.running[slot].user, AnonymousUser)
            request = self._scheduler.finish(slot, keep=error is None and not anonymous)
            held = len(self._scheduler.slots.held(request.holder))
            self._lock.notify_all()
        if not held or held < request.resident_tokens:
            self.runner.trim(slot, held)
        request.end(finish_reason, error)

    def _drop_cancelled(self) -> None:
        with self._lock:
            waiting = [request for request in self._scheduler.waiting if request.cancelled]
            for request in waiting:
                self._scheduler.waiting.remove(request)
            if waiting:
                self._lock.notify_all()
        for request in waiting:
            request.end("cancelled")
        running = self._scheduler.running
        for slot in [slot for slot, request in running.items() if request.cancelled]:
            self._finish(slot, "cancelled")

    def _resize(self, users: int, progress: Progress) -> None:
        if self._closing:
            raise EngineClosedError("the engine is closed; its size cannot change")
        running, old_users = self._scheduler.running, self._scheduler.slots.count
        # Before anything changes: there may be no memory for it.
        saved = {slot: self.runner.save(slot, request) for slot, request in running.items()}
        self.sessions.flush()
        for slot, past in saved.items():
            running[slot].saved_past = past
        with self._lock:
            self._scheduler.pause(self._new_slots(users))
            self._lock.notify_all()  # more slots are more room
        try:
            self.runner.resize(users, progress)
        except BaseException:
            self._go_back(old_users)
            raise

    def _go_back(self, users: int) -> None:
        """After a resize that failed: the old size again, or the end."""
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
        while one is not None:  # their frames refer to the engine, and would keep its caches
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
    """The next token of each row; only rows that the graph's argmax cannot serve are sampled."""
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
    """The likeliest token where the request takes it, or its error; None: it is to be sampled."""
    try:
        return None if request.sampler.needs_logits(token) else Choice(token, None, None)
    except GenerationError as error:
        return error
