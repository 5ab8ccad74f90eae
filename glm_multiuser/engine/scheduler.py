"""Decides what runs in the next step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Callable, Optional

from glm_multiuser.engine.request import AnonymousUser, Request
from glm_multiuser.engine.slot_sessions import SlotSessions
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.step import PromptChunk, Step
from glm_multiuser.engine.waiting import WaitingQueue

ChunkSizes = Callable[[Sequence[Request], int], Sequence[int]]
"""(requests in prefill, in the order of their turns; number of decoding requests) -> how many
tokens of each of the first ones are prefilled in the next step."""


class Scheduler:
    """Requests wait for a slot; those that have one take part in every step.

    Groups share the slots fairly. Within a group, a request can be passed by others only while its
    user is busy, or, by at most as many requests as there are slots, while there is not enough
    memory for it. With chunked prefill, prompts in slots take turns, so that short ones do not wait
    for long ones.

    Args:
        slots: of this engine.
        chunk_sizes: how many tokens of which prompts are prefilled in a step.
        sessions: of the slots' users.
    """

    def __init__(self, slots: Slots, chunk_sizes: ChunkSizes, sessions: SlotSessions) -> None:
        self.slots = slots
        self.sessions = sessions
        self._chunk_sizes = chunk_sizes
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}
        self._prefilling: list[int] = []
        """Slots in prefill, in the order of their turns."""
        self._restoring: set[int] = set()
        """Slots whose users' sessions are being restored."""

    def schedule(self) -> Optional[Step]:
        """The next step, or None if there is nothing to do."""
        returning, trimmed = self._admit()
        away = {*self._prefilling, *returning, *self._restoring}
        decodes = {slot: one for slot, one in self.running.items() if slot not in away}
        step = Step(self._chunks(returning, len(decodes)), decodes, returning, trimmed)
        return step if step.rows or returning or trimmed else None

    def _admit(self) -> tuple[dict[int, Request], dict[int, int]]:
        """Admits requests to slots; returns `returning` and `trimmed` of the step."""
        returning, trimmed = {}, {}
        while (first := self._first(self._may_run)) is not None:
            request = self._fitting(first)
            slot = self.slots.acquire(request.holder, request.longest) if request else None
            if request is None or slot is None:
                break
            first.overtaken += request is not first
            self.waiting.take(request)
            trimmed.update(dict.fromkeys(self.slots.take_emptied(), 0))
            self.running[slot] = request
            if request.saved_past is not None:
                returning[slot] = request
            elif self.sessions.reuse and request.params.reuses_prompt:
                request.reuse(self.slots.held(request.holder))
            held = len(self.slots.held(request.holder))
            request.kept_tokens = min(held, len(request.prompt_token_ids))
            if request.kept_tokens < held:
                trimmed[slot] = request.kept_tokens
            if request.saved_past is None and self.sessions.enter(slot, request):
                self._restoring.add(slot)
            elif not request.prompt_is_in:
                self._prefilling.append(slot)
            request.enter()
        return returning, trimmed

    def _fitting(self, first: Request) -> Optional[Request]:
        """This request, or one that may pass it if there is not enough memory for it."""
        if self.slots.busy == self.slots.count or self._has_memory(first):
            return first
        if first.overtaken >= self.slots.count:
            return None  # wait until there is enough
        return self._first(lambda one: self._may_run(one) and self._has_memory(one))

    def _first(self, may_run: Callable[[Request], bool]) -> Optional[Request]:
        """The next request that may run and does not pass an earlier one of the same user."""
        passed_over: set[Hashable] = set()

        def in_order(request: Request) -> bool:
            runs = request.holder not in passed_over and may_run(request)
            if not runs:
                passed_over.add(request.holder)
            return runs

        return self.waiting.next(self.running.values(), in_order)

    def _may_run(self, request: Request) -> bool:
        return not self.slots.is_busy(request.holder) and self.sessions.ready(request)

    def restored(self, slot: int) -> None:
        """The session in `slot` is restored; the rest of its request's prompt can be prefilled."""
        self._restoring.remove(slot)
        self._prefilling.append(slot)

    def _has_memory(self, request: Request) -> bool:
        return self.slots.has_memory(request.longest)

    def _chunks(self, returning: dict[int, Request], decoding: int) -> dict[int, PromptChunk]:
        turns = [slot for slot in self._prefilling if slot not in returning]
        counts = (
            self._chunk_sizes([self.running[slot] for slot in turns], decoding) if turns else []
        )
        chunks = {
            slot: PromptChunk(self.running[slot], count) for slot, count in zip(turns, counts)
        }
        for slot, chunk in chunks.items():
            # A prompt in layer-wise prefill keeps its turn.
            if chunk.tokens:
                self._prefilling.remove(slot)
                if not chunk.is_last:
                    self._prefilling.append(slot)
        return chunks

    def finish(self, slot: int, failed: bool = False) -> Request:
        """Removes the request in `slot`. Its user keeps the slot, unless the request has failed,
        names no user, or `forget` was called."""
        request = self.running[slot]
        held = request.held_token_ids() if self.sessions.reuse else ()
        keep = not (failed or request.forgotten or isinstance(request.user, AnonymousUser))
        self.slots.release(request.holder, keep, held)
        del self.running[slot]  # only now: if that fails, the request still has to be ended
        self._restoring.discard(slot)
        self.sessions.leave(slot, request, keep, failed)
        if slot in self._prefilling:
            self._prefilling.remove(slot)
        return request

    def forget(self, holder: Hashable) -> None:
        """Frees a user's slot: now if idle, otherwise when its running or paused request ends."""
        for request in self._begun(holder):
            request.forgotten = True
        self.slots.forget(holder)

    def has_begun(self, holder: Hashable) -> bool:
        """Whether a request of this user is running, or was paused by a resize."""
        return next(self._begun(holder), None) is not None

    def _begun(self, holder: Hashable) -> Iterator[Request]:
        paused = (request for request in self.waiting if request.saved_past is not None)
        begun = chain(self.running.values(), paused)
        return (request for request in begun if request.holder == holder)

    def pause(self, slots: Slots) -> None:
        """Moves running requests to the front of the queue, the oldest first, and starts over with
        new slots."""
        paused = sorted(self.running.values(), key=lambda request: request.number)
        self.running = {}
        self._prefilling = []
        self._restoring = set()
        self.slots = slots
        self.waiting.put_first(paused)

    def check(self) -> None:
        """Checks that every running request has a slot and every busy slot a request.

        Raises:
            RuntimeError: the state is inconsistent, which is a bug.
        """
        self.slots.check()
        held = {self.slots.slot_of(request.holder): request for request in self.running.values()}
        if not {*self._prefilling, *self._restoring} <= self.running.keys():
            raise RuntimeError(f"slots {self._prefilling} are in prefill, but not all of them run")
        if held != self.running or self.slots.busy != len(self.running):
            raise RuntimeError(f"running requests {self.running} do not match the slots")
