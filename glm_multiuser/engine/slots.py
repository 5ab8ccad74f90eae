"""Which user holds which slot, and which tokens are cached in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Callable, Optional


class Slots:
    """Assigns slots to users: a slot is free, busy (its user has a running request) or idle.

    An idle slot keeps its user's prefix cache until another user needs the slot or its memory; the
    least recently used is evicted first. A prefix cache is visible to its own user only.

    Args:
        count: number of slots.
        cache_bytes: number of tokens -> memory of a slot's caches.
        limit: maximum of bytes for all caches; None: unlimited. Busy slots count with the maximum
            that their request may need, so that none runs out of memory.
        may_evict: whether the slot of an idle user may be taken now.
        evicted: called with a user whose idle slot was taken.
    """

    def __init__(
        self,
        count: int,
        cache_bytes: Callable[[int], int] = lambda tokens: 0,
        limit: Optional[int] = None,
        may_evict: Callable[[Hashable], bool] = lambda user: True,
        evicted: Callable[[Hashable], None] = lambda user: None,
    ) -> None:
        self.count = count
        self.cache_bytes = cache_bytes
        self.limit = limit
        self.may_evict = may_evict
        self.evicted = evicted
        self._free = list(range(count))
        self._busy: dict[Hashable, int] = {}
        self._idle: dict[Hashable, int] = {}  # in order of last use
        self._held: dict[Hashable, Sequence[int]] = {}
        self._promised: dict[Hashable, int] = {}
        """Busy user -> maximum of bytes that its request may need."""
        self._emptied: list[int] = []

    @property
    def busy(self) -> int:
        return len(self._busy)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def is_busy(self, user: Hashable) -> bool:
        return user in self._busy

    @property
    def taken_bytes(self) -> int:
        """Bytes that busy slots may need, plus those that idle slots use."""
        idle = (self.cache_bytes(len(self.held(user))) for user in self._idle)
        return sum(self._promised.values()) + sum(idle)

    def has_memory(self, tokens: int) -> bool:
        """Whether there is memory for a request of up to `tokens` tokens, besides running ones."""
        if self.limit is None:
            return True
        return sum(self._promised.values()) + self.cache_bytes(tokens) <= self.limit

    def acquire(self, user: Hashable, tokens: int = 0) -> Optional[int]:
        """The user's own idle slot, a free one, or the least recently used idle one, in this order.

        `tokens` is the maximum of its request. Idle users are evicted until there is memory for
        them. None if there is no slot or not enough memory.
        """
        if user in self._busy:
            raise RuntimeError(f"user {user!r} holds slot {self._busy[user]} already")
        if not self._make_room(user, tokens):
            return None
        slot = self._idle.pop(user) if user in self._idle else self._free.pop(0)
        self._promised[user] = self.cache_bytes(tokens)
        self._busy[user] = slot
        return slot

    def _make_room(self, user: Hashable, tokens: int) -> bool:
        """Evicts others until there are a slot and memory; returns whether that succeeded. It may
        fail temporarily, until the next user may be evicted."""
        if self.busy == self.count or not self.has_memory(tokens):
            return False
        others = [one for one in self._idle if one != user]
        while not self._has_room(user, tokens):
            if not self.may_evict(others[0]):
                return False
            self._evict(others.pop(0))
        return True

    def _has_room(self, user: Hashable, tokens: int) -> bool:
        if user not in self._idle and not self._free:
            return False
        if self.limit is None:
            return True
        own = self.cache_bytes(len(self.held(user))) if user in self._idle else 0
        return self.taken_bytes - own + self.cache_bytes(tokens) <= self.limit

    def _evict(self, user: Hashable) -> None:
        slot = self._idle.pop(user)
        if self._held.pop(user, ()):
            self._emptied.append(slot)
        self._free.append(slot)
        self._free.sort()
        self.evicted(user)

    def take_emptied(self) -> list[int]:
        """Slots whose users were evicted since the last call, so that their memory can be freed."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def held(self, user: Hashable) -> Sequence[int]:
        """The token ids whose keys and values are cached in the user's slot."""
        return self._held.get(user, ())

    def forget(self, user: Hashable) -> None:
        """Frees the slot of an idle user."""
        if user in self._idle:
            self._evict(user)

    def release(self, user: Hashable, keep: bool = True, held: Sequence[int] = ()) -> None:
        """The user's request has ended; with `keep`, the user keeps the slot and its contents."""
        slot = self._busy.pop(user)
        del self._promised[user]
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

    def idle_tokens(self) -> list[int]:
        """Number of tokens cached in each idle slot."""
        return [len(self.held(user)) for user in self._idle]

    def check(self) -> None:
        """Checks that every slot is in exactly one state, and memory within its limit.

        Raises:
            RuntimeError: the state is inconsistent, which is a bug.
        """
        slots = sorted([*self._free, *self._busy.values(), *self._idle.values()])
        if not self._held.keys() <= {*self._busy, *self._idle}:
            raise RuntimeError(f"tokens are known of users without a slot: {list(self._held)}")
        if self.limit is not None and self.taken_bytes > self.limit:
            raise RuntimeError(f"{self.taken_bytes} bytes are taken of {self.limit}")
        if slots != list(range(self.count)):
            raise RuntimeError(
                f"slots out of order: free {self._free}, busy {self._busy}, idle {self._idle}"
            )
