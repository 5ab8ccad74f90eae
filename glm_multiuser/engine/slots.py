"""Which user holds which slot, and which tokens its slot holds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Optional


class Slots:
    """Users and slots: a slot is free, busy (its user has a request running) or idle.

    An idle slot keeps its user's prefix cache until another user needs the slot; the least recently
    used is evicted first. A prefix cache is visible to its own user only.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._busy: dict[Hashable, int] = {}
        self._idle: dict[Hashable, int] = {}  # in order of last use
        self._held: dict[Hashable, Sequence[int]] = {}

    @property
    def busy(self) -> int:
        return len(self._busy)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def is_busy(self, user: Hashable) -> bool:
        return user in self._busy

    def acquire(self, user: Hashable) -> Optional[int]:
        """The user's own idle slot, else a free one, else the one idle for longest, else None."""
        if user in self._busy:
            raise RuntimeError(f"user {user!r} holds slot {self._busy[user]} already")
        if user in self._idle:
            slot = self._idle.pop(user)
        elif self._free:
            slot = self._free.pop(0)
        elif self._idle:
            evicted = next(iter(self._idle))
            slot = self._idle.pop(evicted)
            self._held.pop(evicted, None)
        else:
            return None
        self._busy[user] = slot
        return slot

    def held(self, user: Hashable) -> Sequence[int]:
        """The token ids whose keys and values the user's slot still has."""
        return self._held.get(user, ())

    def release(self, user: Hashable, keep: bool = True, held: Sequence[int] = ()) -> None:
        """The user's request has ended; `keep` leaves the slot, and what it holds, to the user."""
        slot = self._busy.pop(user)
        if keep:
            self._idle[user] = slot
            self._held[user] = held
        else:
            self._held.pop(user, None)
            self._free.append(slot)
            self._free.sort()

    def holders(self) -> list[Optional[Hashable]]:
        """The user of each slot, busy or idle; None for a free one."""
        held = {slot: user for users in (self._busy, self._idle) for user, slot in users.items()}
        return [held.get(slot) for slot in range(self.count)]

    def slot_of(self, user: Hashable) -> Optional[int]:
        return self._busy.get(user, self._idle.get(user))

    def check(self) -> None:
        """Every slot is in exactly one state.

        Raises:
            RuntimeError: the state is inconsistent, which is a defect of the engine.
        """
        slots = sorted([*self._free, *self._busy.values(), *self._idle.values()])
        if not self._held.keys() <= {*self._busy, *self._idle}:
            raise RuntimeError(f"tokens are known of users without a slot: {list(self._held)}")
        if slots != list(range(self.count)):
            raise RuntimeError(
                f"slots out of order: free {self._free}, busy {self._busy}, idle {self._idle}"
            )
