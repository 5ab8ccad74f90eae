"""The thread-safe interface of an engine: submit, cancel, resize, close."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Callable, Optional

from glm_multiuser.device_thread import DEVICE_THREAD, DeviceThread
from glm_multiuser.engine.request import AnonymousUser, Request, user_of
from glm_multiuser.engine.runner import Runner
from glm_multiuser.engine.step_loop import StepLoop
from glm_multiuser.engine.waiting import has_room
from glm_multiuser.errors import (
    EngineClosedError,
    GLMMultiUserError,
    QueueFullError,
    UserBusyError,
    check_seconds,
)
from glm_multiuser.progress import Progress
from glm_multiuser.sessions.session import Session, SessionInfo
from glm_multiuser.sessions.store import SessionStore
from glm_multiuser.sizes import most_within

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotReport:
    """The state of a slot.

    Attributes:
        state: "free", "prefill", "decode" or "idle" (kept for its user, nothing runs).
        user: its owner; None for a free slot, and for a request without a user.
        request: number of the running request, as in `Handle.number`.
        prompt_tokens, generated_tokens: of that request.
    """

    state: str
    user: Optional[Hashable] = None
    request: Optional[int] = None
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Engine(StepLoop):
    """Owns the queue, the slots and the running requests of one model.

    Requests are submitted from any thread; everything else happens on the device thread, one step
    at a time, alternating with the other engines of the process.

    Args:
        runner, users, reuse, cache_limit, store: as in `StepLoop`; without a store, sessions of
            evicted users are dropped.
        max_queue: maximum number of waiting requests; a group may always use its share of it.
        max_queue_per_user: maximum number of waiting requests per user.
        device_thread: that of the process, except in tests.
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
        self.store = store or SessionStore()
        super().__init__(runner, users, reuse, cache_limit, self.store)
        self.max_queue = max_queue
        self.max_queue_per_user = max_queue_per_user
        self._device_thread = device_thread
        self.store.on_change = device_thread.wake
        device_thread.attach(self.step)

    def submit(self, request: Request, wait: bool = False) -> None:
        """Adds a request to the queue; with `wait`, blocks until there is room.

        Raises:
            EngineClosedError: the engine is closed or closing, or the process is about to end.
            QueueFullError: `max_queue` requests are waiting.
            UserBusyError: `max_queue_per_user` requests of this user are waiting.
        """
        self._device_thread.check_open()
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: self._closing or self._refusal(request) is None)
            refusal = self._refusal(request)
            if refusal is not None:
                raise refusal
            if isinstance(request.user, (int, str)):
                request.identity = self.store.identity(request.owner, request.user)
            self._scheduler.waiting.append(request)
            self._queue_has_cancelled |= request.cancelled
        self._device_thread.wake()

    def check_queue(self, group: str) -> None:
        """Raises what `submit` would raise for any request of this group.

        Raises:
            EngineClosedError, QueueFullError: as `submit` does.
        """
        self._device_thread.check_open()
        with self._lock:
            refusal = self._refusal_of_group(group)
        if refusal is not None:
            raise refusal

    def _refusal(self, request: Request) -> Optional[GLMMultiUserError]:
        refusal = self._refusal_of_group(request.group)
        if refusal is not None:
            return refusal
        of_user = self._scheduler.waiting.of_holder(request.holder)
        if of_user >= self.max_queue_per_user:
            return UserBusyError(
                f"user {request.user!r} has {of_user} requests waiting; "
                f"max_queue_per_user is {self.max_queue_per_user}",
                field="user",
            )
        return None

    def _refusal_of_group(self, group: str) -> Optional[GLMMultiUserError]:
        waiting, slots = self._scheduler.waiting, self._scheduler.slots
        if self._closing:
            return EngineClosedError("the engine is closed; it takes no new requests")
        # Requests that will get a free slot in the next steps do not count as waiting.
        free = slots.count - slots.busy
        if has_room(waiting.counts(), group, self.max_queue, free):
            return None
        return QueueFullError(f"{len(waiting)} requests are waiting; max_queue is {self.max_queue}")

    def cancel(self, request: Request) -> None:
        """Cancels a request in any state; its slot becomes free within two steps."""
        request.cancel()
        self._queue_has_cancelled = True
        self._device_thread.wake()

    def resize(
        self, users: int, progress: Progress, on_resized: Callable[[], None] = lambda: None
    ) -> None:
        """Changes the number of slots; running requests pause, keep their caches, and resume.

        Args:
            on_resized: called on the device thread after a success, so that the calls of concurrent
                resizes are in the order of the resizes.

        Raises:
            EngineClosedError: the engine is closed or closing.
            Exception: what the device or `progress` raised. The engine has its old size again and
                nothing was lost; if that fails as well, it closes.
        """

        def resize() -> None:
            self._resize(users, progress)
            on_resized()

        self._device_thread.call(resize)

    def close(self, drain: float) -> None:
        """Rejects new requests, waits `drain` seconds for accepted ones, then cancels the rest.

        Returns when the sessions of idle users are on disk, if the store writes them there.

        Raises:
            InvalidParameterError: `drain` is not a number.
            EngineClosedError: this process was forked from the engine's.
        """
        drain = check_seconds("drain", drain)
        self._device_thread.check_process()
        if self._device_thread.stopped:
            return  # the process is ending
        with self._lock:
            self._closing = True
            self._lock.notify_all()
            self._lock.wait_for(self._is_empty, timeout=drain)
            for request in self._accepted():
                request.cancel()
            self._queue_has_cancelled = True
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
        """Saves the sessions of all idle users, while other engines run."""
        futures = self._device_thread.call(self.sessions.export_all)
        self._device_thread.wake()
        for future in futures:
            if future.exception() is not None:
                logger.warning("a session is not saved: %r", future.exception())

    def export(self, holder: Hashable) -> Optional[Session]:
        """A copy of an idle user's session in its slot; None if there is none.

        Raises:
            UserBusyError: the user has a running request.
            EngineClosedError: the engine is closed or closing.
        """

        def export() -> Optional[Future[Session]]:
            if self._closing:
                raise EngineClosedError("the engine is closed; its slots hold nothing")
            self._check_idle(holder)
            return self.sessions.export(holder)

        future = self._device_thread.call(export)
        self._device_thread.wake()
        try:
            return future.result() if future is not None else None
        except KeyError:  # meanwhile, the slot was given to another user
            return None

    def _check_idle(self, holder: Hashable) -> None:
        self._drop_cancelled()  # for the user, a cancelled request has ended, as at a stop string
        with self._lock:
            busy = self._scheduler.has_begun(holder)
        if busy:
            raise UserBusyError(f"user {user_of(holder)!r} has a request running", field="user")

    def session_infos(self, owner: bytes) -> list[SessionInfo]:
        """The sessions of a tenant; if a session is in a slot and in the store, only the former."""
        held = self._device_thread.call(lambda: self.sessions.of_owner(self.store.owner(owner)))
        in_slots = [SessionInfo(user, "slot", len(one.token_ids), 0) for user, one in held]
        names = {user for user, _ in held}
        return in_slots + [one for one in self.store.list(owner) if one.user not in names]

    def forget(self, holder: Hashable, only_idle: bool = False) -> None:
        """Frees an idle user's slot, or a busy user's as soon as its request has ended.

        Raises:
            UserBusyError: with `only_idle`, the user has a running request.
            EngineClosedError: with `only_idle`, the engine is closed or closing.
        """

        def forget() -> None:
            if only_idle:
                if self._closing:
                    raise EngineClosedError("the engine is closed; it loads no sessions")
                self._check_idle(holder)
            with self._lock:
                self._scheduler.forget(holder)
                emptied = self._scheduler.slots.take_emptied()
            for slot in emptied:
                self.runner.trim(slot, 0)

        self._device_thread.call(forget)

    def numbers(self) -> tuple[int, int, int]:
        """Number of busy slots, of idle slots, and of waiting requests."""
        self._device_thread.check_process()
        with self._lock:
            slots = self._scheduler.slots
            return slots.busy, slots.idle, len(self._scheduler.waiting)

    def longest(self, seq_length: int) -> int:
        """The maximum of tokens of a request that fits into memory, at most `seq_length`."""
        if self.cache_limit is None:
            return seq_length
        return most_within(self.cache_limit, self.runner.cache_bytes, seq_length)

    def resident_bytes(self) -> int:
        """Memory of the caches, from the tokens in the slots; those of a step count after it."""
        self._device_thread.check_process()
        with self._lock:
            slots, running = self._scheduler.slots, list(self._scheduler.running.values())
            held = [*(request.resident_tokens for request in running), *slots.idle_tokens()]
        free = slots.count - len(held)
        return free * self.runner.cache_bytes(0) + sum(map(self.runner.cache_bytes, held))

    def slots(self) -> list[SlotReport]:
        """The state of each slot, by its number."""
        self._device_thread.check_process()
        with self._lock:
            running = dict(self._scheduler.running)
            holders = self._scheduler.slots.holders()
        reports = []
        for slot, holder in enumerate(holders):
            user = user_of(holder)
            name = None if isinstance(user, AnonymousUser) else user
            request = running.get(slot)
            if request is None:
                reports.append(SlotReport("free" if holder is None else "idle", name))
                continue
            generated = len(request.output_token_ids)
            state = "decode" if generated else "prefill"
            prompt = len(request.prompt_token_ids)
            reports.append(SlotReport(state, name, request.number, prompt, generated))
        return reports
