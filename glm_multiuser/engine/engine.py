"""The step loop: schedule -> run -> sample -> hand out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Callable, Optional, Union

from glm_multiuser.device_thread import DEVICE_THREAD, DeviceThread
from glm_multiuser.engine.prompt_logprobs import not_finite, score
from glm_multiuser.engine.request import AnonymousUser, Request
from glm_multiuser.engine.runner import RowResults, Runner
from glm_multiuser.engine.scheduler import Scheduler, Step
from glm_multiuser.engine.slot_sessions import SlotSessions
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.waiting import has_room
from glm_multiuser.errors import (
    EngineClosedError,
    GenerationError,
    GLMMultiUserError,
    QueueFullError,
    UserBusyError,
)
from glm_multiuser.progress import Progress
from glm_multiuser.sampling import Choice, choose
from glm_multiuser.sessions.session import Session, SessionInfo
from glm_multiuser.sessions.store import SessionStore
from glm_multiuser.sizes import most_within

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


@dataclass(frozen=True)
class SlotReport:
    """What is in a slot.

    Attributes:
        state: "free", "prefill", "decode" or "idle" (kept for its user, nothing runs).
        user: whose it is; None for a free slot, and for a request that named no user.
        request: number of the request that runs in it, as in `Handle.number`.
        prompt_tokens, generated_tokens: of that request.
    """

    state: str
    user: Optional[Hashable] = None
    request: Optional[int] = None
    prompt_tokens: int = 0
    generated_tokens: int = 0


Chosen = Union[Choice, GenerationError]
"""The next token of a row, or why there is none."""

FAILED_STEPS_MAX = 3
"""After so many steps in a row that the device could not run, the engine closes."""


class Engine:
    """Owns the queue, the slots and the running requests of one model.

    Requests enter from any thread; everything else happens on the device thread, one step at a
    time, in turn with the other engines of the process.

    Args:
        runner: runs the graphs.
        users: slots.
        max_queue: requests that may wait for a slot; a group may always have its share of it.
        max_queue_per_user: of these, how many may be one user's.
        device_thread: the process's own, unless a test brings another.
        reuse: whether the prefix cache of the user's slot is used; for causal models only.
        cache_limit: bytes that all caches together may take; None: any.
        store: keeps sessions whose slot was taken; None: nothing does.

    Attributes:
        failure: what made the engine close by itself; None as long as it has not.
        on_step: called after every step on the device thread; must return immediately, not raise.
    """

    def __init__(
        self,
        runner: Runner,
        users: int,
        max_queue: int,
        max_queue_per_user: int,
        device_thread: DeviceThread = DEVICE_THREAD,
        reuse: bool = False,
        cache_limit: Optional[int] = None,
        store: Optional[SessionStore] = None,
    ) -> None:
        self.runner = runner
        self.cache_limit = cache_limit
        self.max_queue = max_queue
        self.max_queue_per_user = max_queue_per_user
        self.counters = Counters()
        self._reuse = reuse
        self.store = store or SessionStore()
        self.sessions = SlotSessions(runner, self.store, reuse)
        self._step_seconds = 0.0
        self._scheduler = self._new_scheduler(users)
        self._lock = threading.Condition()
        """Guards the scheduler's queue, which other threads add to, and `_closing`."""
        self._closing = False
        self._failed_steps = 0
        self.failure: Optional[Exception] = None
        self.on_step: Callable[[StepReport], None] = lambda report: None
        self._device_thread = device_thread
        self.store.on_change = device_thread.wake
        device_thread.attach(self.step)

    def _new_scheduler(self, users: int) -> Scheduler:
        slots = self._new_slots(users)
        return Scheduler(slots, self.runner.take, self._reuse, self.sessions)

    def _new_slots(self, users: int) -> Slots:
        return Slots(users, self.runner.cache_bytes, self.cache_limit)

    # Called from any thread.

    def submit(self, request: Request, wait: bool = False) -> None:
        """Puts a request into the queue; with `wait` only as soon as there is room.

        Raises:
            EngineClosedError: the engine is closed or closing.
            QueueFullError: as many requests wait as may wait.
            UserBusyError: as many requests of this user wait as may wait.
        """
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: self._closing or self._refusal(request) is None)
            refusal = self._refusal(request)
            if refusal is not None:
                raise refusal
            self._scheduler.waiting.append(request)
        self._device_thread.wake()

    def _refusal(self, request: Request) -> Optional[GLMMultiUserError]:
        scheduler, slots = self._scheduler, self._scheduler.slots
        if self._closing:
            return EngineClosedError("the engine is closed; it takes no new requests")
        # What a free slot will take in at the next steps does not wait in the sense of the limit.
        free = slots.count - slots.busy
        if not has_room(scheduler.waiting.counts(), request.group, self.max_queue, free):
            return QueueFullError(
                f"{len(scheduler.waiting)} requests are waiting; max_queue is {self.max_queue}"
            )
        of_user = sum(waiting.user == request.user for waiting in scheduler.waiting)
        if of_user >= self.max_queue_per_user:
            return UserBusyError(
                f"user {request.user!r} has {of_user} requests waiting; "
                f"max_queue_per_user is {self.max_queue_per_user}",
                field="user",
            )
        return None

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is; its slot is free within two steps."""
        request.cancel()
        self._device_thread.wake()

    def resize(self, users: int, progress: Progress) -> None:
        """Changes the number of slots; what runs pauses, keeps its caches, and goes on.

        Raises:
            EngineClosedError: the engine is closed or closing.
            Exception: what the device or `progress` raised. The engine is back at its old size
                and nothing was lost; should even that fail, it closes.
        """
        self._device_thread.call(lambda: self._resize(users, progress))

    def close(self, drain: float) -> None:
        """Takes nothing new, gives what was accepted `drain` seconds to end, cancels the rest.

        Returns when the sessions of idle users are on disk, where they are kept there.
        """
        if self._device_thread.stopped:
            return  # the process is ending
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            self._lock.wait_for(self._is_empty, timeout=drain)
            for request in self._accepted():
                request.cancel()
        self._device_thread.wake()
        with self._lock:
            self._lock.wait_for(self._is_empty)
        if self.store.writes_behind:
            self._save_all()
        self._device_thread.detach(self.step)
        self._device_thread.call(self._free)
        self.store.close()

    def _free(self) -> None:
        self.sessions.reset()
        self.runner.close()

    def _save_all(self) -> None:
        """Saves every idle user's session, while the engines of other models run."""
        futures = self._device_thread.call(self.sessions.export_all)
        self._device_thread.wake()
        for future in futures:
            if future.exception() is not None:
                logger.warning("a session is not saved: %r", future.exception())

    def export(self, user: Hashable) -> Optional[Session]:
        """A copy of what an idle user's slot holds; None if it holds nothing.

        Raises:
            UserBusyError: the user has a request running.
            EngineClosedError: the engine is closed or closing.
        """

        def export() -> Optional[Future[Session]]:
            if self._closing:
                raise EngineClosedError("the engine is closed; its slots hold nothing")
            self._check_idle(user)
            return self.sessions.export(user)

        future = self._device_thread.call(export)
        self._device_thread.wake()
        try:
            return future.result() if future is not None else None
        except KeyError:  # meanwhile another user has got the slot
            return None

    def _check_idle(self, user: Hashable) -> None:
        if self._scheduler.slots.is_busy(user):
            raise UserBusyError(f"user {user!r} has a request running", field="user")

    def session_infos(self, owner: bytes) -> list[SessionInfo]:
        """The sessions of a tenant; one that is in a slot is listed there."""
        held = self._device_thread.call(lambda: self.sessions.of_owner(self.store.owner(owner)))
        in_slots = [SessionInfo(user, "slot", len(one.token_ids), 0) for user, one in held]
        names = {user for user, _ in held}
        return in_slots + [one for one in self.store.list(owner) if one.user not in names]

    def forget(self, user: Hashable, only_idle: bool = False) -> None:
        """Takes an idle user's slot away, and a busy one's as soon as its request has ended.

        Raises:
            UserBusyError: with `only_idle`, the user has a request running.
        """

        def forget() -> None:
            if only_idle:
                self._check_idle(user)
            with self._lock:
                self._scheduler.slots.forget(user)
                emptied = self._scheduler.slots.take_emptied()
            for slot in emptied:
                self.runner.keep(slot, 0)

        self._device_thread.call(forget)

    def numbers(self) -> tuple[int, int, int]:
        """Busy slots, idle slots and waiting requests."""
        with self._lock:
            slots = self._scheduler.slots
            return slots.busy, slots.idle, len(self._scheduler.waiting)

    def longest(self, seq_length: int) -> int:
        """The most tokens of one request, up to `seq_length`, that there can be memory for."""
        if self.cache_limit is None:
            return seq_length
        return most_within(self.cache_limit, self.runner.cache_bytes, seq_length)

    def resident_bytes(self) -> int:
        """Memory of caches, by the tokens in the slots; a step adds its own when it has run."""
        with self._lock:
            slots, running = self._scheduler.slots, list(self._scheduler.running.values())
            held = [*(request.resident_tokens for request in running), *slots.idle_tokens()]
        free = slots.count - len(held)
        return free * self.runner.cache_bytes(0) + sum(map(self.runner.cache_bytes, held))

    def slots(self) -> list[SlotReport]:
        """What is in each slot, by its number."""
        with self._lock:
            running = dict(self._scheduler.running)
            holders = self._scheduler.slots.holders()
        reports = []
        for slot, user in enumerate(holders):
            name = None if isinstance(user, AnonymousUser) else user
            request = running.get(slot)
            if request is None:
                reports.append(SlotReport("free" if user is None else "idle", name))
                continue
            generated = len(request.output_token_ids)
            state = "decode" if generated else "prefill"
            prompt = len(request.prompt_token_ids)
            reports.append(SlotReport(state, name, request.number, prompt, generated))
        return reports

    def _accepted(self) -> list[Request]:
        return [*self._scheduler.waiting, *self._scheduler.running.values()]

    def _is_empty(self) -> bool:
        return not self._accepted()

    # Called on the device thread.

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
        for slot, tokens in step.kept.items() if step is not None else ():
            self.runner.keep(slot, tokens)
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
            held = len(self._scheduler.slots.held(request.user))
            self._lock.notify_all()
        if not held or held < request.resident_tokens:
            self.runner.keep(slot, held)
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
        self.sessions.flush()
        running, old_users = self._scheduler.running, self._scheduler.slots.count
        saved = {slot: self.runner.save(slot, request) for slot, request in running.items()}
        for slot, past in saved.items():
            running[slot].saved_past = past
        with self._lock:
            self._scheduler.pause(self._new_slots(users))
        try:
            self.runner.resize(users, progress)
        except BaseException:
            self._go_back(old_users)
            raise
        finally:
            self._device_thread.wake()

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
        with self._lock:
            self.failure = error
            requests = self._accepted()
            self.sessions.reset()
            self._scheduler = self._new_scheduler(self._scheduler.slots.count)
            self._closing = True
            self._lock.notify_all()
        for request in requests:
            request.end("error", GenerationError(f"the engine failed and is closed: {error}"))


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
