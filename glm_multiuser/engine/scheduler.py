"""What runs in the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional, Union

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.slots import Slots


@dataclass(frozen=True)
class Prefill:
    """Whole prompts enter their slots (or, after a resize, what was saved of one), by slot."""

    requests: dict[int, Request]


@dataclass(frozen=True)
class Decode:
    """One token for every running request, by slot."""

    requests: dict[int, Request]


Step = Union[Prefill, Decode]

PromptGroup = tuple[int, int]
"""(kind, most): prompts of one kind may enter together, up to so many."""

ALONE: PromptGroup = (0, 1)


class Scheduler:
    """Requests wait in order of arrival; prefills and decode steps alternate, so nobody starves.

    A request whose user is busy lets others pass; no other request is ever overtaken.

    Args:
        slots: who may run.
        prompt_group: of a request: the kind of its prompt, and how many of that kind, one behind
            the other in the queue, may enter in one step.
    """

    def __init__(self, slots: Slots, prompt_group: Callable[[Request], PromptGroup]) -> None:
        self.slots = slots
        self.prompt_group = prompt_group
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
        entering: dict[int, Request] = {}
        group: Optional[PromptGroup] = None
        for request in list(self.waiting):
            if self.slots.is_busy(request.user):
                continue
            if group is not None and (group != self._group(request) or len(entering) == group[1]):
                break
            slot = self.slots.acquire(request.user)
            if slot is None:
                break
            group = self._group(request)
            self.waiting.remove(request)
            self.running[slot] = entering[slot] = request
            request.enter()
        return Prefill(entering) if entering else None

    def _group(self, request: Request) -> PromptGroup:
        return ALONE if request.saved_past is not None else self.prompt_group(request)

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
