"""What runs in the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional, Union

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.slots import Slots


@dataclass(frozen=True)
class Prefill:
    """Prompts, or a chunk of one, or after a resize what was saved of one, enter by slot."""

    requests: dict[int, Request]


@dataclass(frozen=True)
class Decode:
    """One token for every running request, by slot."""

    requests: dict[int, Request]


Step = Union[Prefill, Decode]

PromptGroup = tuple[int, int]
"""(kind, most): prompts of one kind may enter together, up to so many."""

ALONE: PromptGroup = (0, 1)


def whole_prompt(request: Request) -> int:
    return len(request.prompt_token_ids)


class Scheduler:
    """Requests wait in order of arrival; prefills and decode steps alternate, so nobody starves.

    A request whose user is busy lets others pass; no other request is ever overtaken on its way
    into a slot. There, prompts of several chunks take turns, so a short one is not held up by a
    long one.

    Args:
        slots: who may run.
        prompt_group: of a request: the kind of its prompt, and how many of that kind, one behind
            the other in the queue, may enter in one step.
        next_chunk: of a request: how many more tokens of its prompt one step takes in.
        reuse: whether a prompt may start behind what its user's slot still holds of it.
    """

    def __init__(
        self,
        slots: Slots,
        prompt_group: Callable[[Request], PromptGroup],
        next_chunk: Callable[[Request], int] = whole_prompt,
        reuse: bool = False,
    ) -> None:
        self.slots = slots
        self.prompt_group = prompt_group
        self.next_chunk = next_chunk
        self.reuse = reuse
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self._entering: list[dict[int, Request]] = []
        """Groups whose prompts are not wholly in, in the order of their turns."""
        self._decode_is_due = False

    def schedule(self) -> Optional[Step]:
        """The next step, or None when there is nothing to do."""
        decoding = self._decoding()
        if not (self._decode_is_due and decoding):
            prefill = self._prefill()
            if prefill is not None:
                self._decode_is_due = True
                return prefill
        self._decode_is_due = False
        return Decode(decoding) if decoding else None

    def _decoding(self) -> dict[int, Request]:
        entering = {slot for group in self._entering for slot in group}
        return {slot: one for slot, one in self.running.items() if slot not in entering}

    def _prefill(self) -> Optional[Prefill]:
        admitted = self._admit()
        if admitted:
            self._entering.append(admitted)
        if not self._entering:
            return None
        group = self._entering.pop(0)
        if not all(self._is_in_after_this(request) for request in group.values()):
            self._entering.append(group)
        return Prefill(dict(group))

    def _is_in_after_this(self, request: Request) -> bool:
        # What was saved comes back in a step of its own.
        chunk = 0 if request.saved_past is not None else self.next_chunk(request)
        return request.computed_tokens + chunk >= len(request.prompt_token_ids)

    def _admit(self) -> dict[int, Request]:
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
            if self.reuse and request.params.cache_prompt and request.saved_past is None:
                request.reuse(self.slots.held(request.user))
            request.enter()
        return entering

    def _group(self, request: Request) -> PromptGroup:
        return ALONE if request.saved_past is not None else self.prompt_group(request)

    def finish(self, slot: int, keep: bool = True) -> Request:
        """The request in `slot` has ended; `keep` leaves the slot to its user."""
        request = self.running[slot]
        self.slots.release(request.user, keep, request.held_token_ids())
        del self.running[slot]
        for group in self._entering:
            group.pop(slot, None)
        self._entering = [group for group in self._entering if group]
        return request

    def pause(self, slots: Slots) -> list[tuple[int, Request]]:
        """Puts everything that runs in front of the queue and starts over with other slots.

        Returns:
            What ran, with the slots that it had, oldest first.
        """
        paused = sorted(self.running.items(), key=lambda item: item[1].number)
        self.running = {}
        self._entering = []
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
        entering = {slot: one for group in self._entering for slot, one in group.items()}
        if not entering.items() <= self.running.items():
            raise RuntimeError(f"prompts {entering} enter slots that are not theirs")
        if held != self.running or self.slots.busy != len(self.running):
            raise RuntimeError(f"running requests {self.running} do not match the slots")
