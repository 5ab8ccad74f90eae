"""Decides what runs in the next step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Callable, Optional

from glm_multiuser.engine.request import Request
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
        reuse: whether the prefix cache of the user's slot is used.
        sessions: of evicted users; None: they are dropped.
    """

    def __init__(
        self,
        slots: Slots,
        chunk_sizes: ChunkSizes,
        reuse: bool = False,
        sessions: Optional[SlotSessions] = None,
    ) -> None:
        self.sessions = sessions
        self.slots = self._watched(slots)
        self._chunk_sizes = chunk_sizes
        self.reuse = reuse
        self.waiting = WaitingQueue()
        self.running: dict[int, Request] = {}
        self._prefilling: list[int] = []
        """Slots in prefill, in the order of their turns."""
        self._restoring: set[int] = set()
        """Slots whose users' sessions are being restored."""

    def _watched(self, slots: Slots) -> Slots:
        """`slots`, whose sessions are saved before another user gets the slot."""
        if self.sessions is not None:
            slots.may_evict, slots.evicted = self.sessions.may_evict, self.sessions.evicted
        return slots

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
            elif self.reuse and request.params.reuses_prompt:
                request.reuse(self.slots.held(request.holder))
            held = len(self.slots.held(request.holder))
            request.kept_tokens = min(held, len(request.prompt_token_ids))
            if request.kept_tokens < held:
                trimmed[slot] = request.kept_tokens
            if self._begin_restore(slot, request):
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
        if self.slots.is_busy(request.holder):
            return False
        return self.sessions is None or self.sessions.ready(request)

    def _begin_restore(self, slot: int, request: Request) -> bool:
        """Starts restoring a request's session; returns whether there is one to wait for."""
        if self.sessions is None or request.saved_past is not None:
            return False
        return self.sessions.enter(slot, request)

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

    def finish(self, slot: int, keep: bool = True) -> Request:
        """Removes the request in `slot`; with `keep`, its user keeps the slot, unless `forget` was
        called."""
        request = self.running[slot]
        held = request.held_token_ids() if self.reuse else ()
        kept = keep and not request.forgotten
        self.slots.release(request.holder, kept, held)
        del self.running[slot]
        self._restoring.discard(slot)
        if self.sessions is not None:
            self.sessions.leave(slot, request, kept, failed=not keep)
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

    def pause(self, slots: Slots) -> list[tuple[int, Request]]:
        """Moves running requests to the front of the queue and starts over with new slots.

        Returns the paused requests with their previous slots, oldest first.
        """
        paused = sorted(self.running.items(), key=lambda item: item[1].number)
        self.running = {}
        self._prefilling = []
        self._restoring = set()
        self.slots = self._watched(slots)
        self.waiting.put_first(request for _, request in paused)
        return paused

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
