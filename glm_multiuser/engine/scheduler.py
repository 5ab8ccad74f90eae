"""What runs in the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.slots import Slots


@dataclass(frozen=True)
class Prefill:
    """One request's whole prompt enters its slot (or, after a resize, what was saved of it)."""

    slot: int
    request: Request


@dataclass(frozen=True)
class Decode:
    """One token for every running request, by slot."""

    requests: dict[int, Request]


Step = Union[Prefill, Decode]


class Scheduler:
    """Requests wait in order of arrival; prefills and decode steps alternate, so nobody starves.

    A request whose user is busy lets others pass; no other request is ever overtaken.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._decode_is_due = False

    def schedule(self) -> Optional[Step]:
        """The next step, or None when there is nothing to do."""
        if not (self._decode_is_due and self.running):
            prefill = self._admit()
            if prefill is not None:
                self._decode_is_due = True
                return prefill
        self._decode_is_due = False
        return Decode(dict(self.running)) if self.running else None

    def _admit(self) -> Optional[Prefill]:
        for request in self.waiting:
            if self.slots.is_busy(request.user):
                continue
            slot = self.slots.acquire(request.user)
            if slot is None:
                return None
            self.waiting.remove(request)
            self.running[slot] = request
            request.enter()
            return Prefill(slot, request)
        return None

    def finish(self, slot: int, keep: bool = True) -> Request:
        """The request in `slot` has ended; `keep` leaves the slot to its user."""
        self.slots.release(self.running[slot].user, keep)
        return self.running.pop(slot)

    def pause(self, slots: Slots) -> list[tuple[int, Request]]:
        """Puts everything that runs in front of the queue and starts over with other slots.

        Returns:
            What ran, with the slots that it had, oldest first.
        """
        paused = sorted(self.running.items(), key=lambda item: item[1].number)
        self.running = {}
        self.slots = slots
        self.waiting[:0] = [request for _, request in paused]
        return paused

    def check(self) -> None:
        """No request without a slot, no busy slot without a request.

        Raises:
            RuntimeError: the books are wrong, which is a defect of the engine.
        """
        self.slots.check()
        held = {self.slots.slot_of(request.user): request for request in self.running.values()}
        if held != self.running or self.slots.busy != len(self.running):
            raise RuntimeError(f"running requests {self.running} do not match the slots")
