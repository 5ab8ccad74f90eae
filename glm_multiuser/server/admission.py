"""Admission control: limits concurrent requests per user and per key."""

from __future__ import annotations

from collections import Counter
from typing import Callable, Optional

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.settings import Limits

BUSY_RETRY_SECONDS = 1.0


class Admission:
    """Counts requests by user and by key. Used on the event loop only, so it needs no lock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_key: Counter[str] = Counter()
        self._by_user: Counter[str] = Counter()

    def admit(self, caller: Caller, user: Optional[str], count: int = 1) -> Callable[[], None]:
        """Admits a request with `count` answers: one request of its user, `count` of its key.

        Returns:
            A function to call at the end of each answer.

        Raises:
            APIError: 429, a limit is exceeded; nothing is admitted.
        """
        limits = self._limits
        self._check("key", caller.key, self._by_key, count, limits.requests_per_key)
        if user is not None:
            self._check("user", user, self._by_user, 1, limits.requests_per_user)
            self._by_user[user] += 1
        self._by_key[caller.key] += count
        running = count

        def release() -> None:
            nonlocal running
            running -= 1
            _take_one(self._by_key, caller.key)
            if user is not None and not running:
                _take_one(self._by_user, user)

        return release

    @property
    def in_flight(self) -> int:
        """Number of answers admitted and not released."""
        return sum(self._by_key.values())

    @staticmethod
    def _check(kind: str, name: str, counts: Counter[str], count: int, limit: int) -> None:
        if counts[name] + count > limit:
            raise APIError(
                429,
                f"{kind}_busy",
                f"{kind} {name!r} has {counts[name]} requests running or waiting and asks for "
                f"{count} more; requests_per_{kind} is {limit}",
                retry_after=BUSY_RETRY_SECONDS,
            )


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
