"""The queue of requests that wait for a slot, and fair sharing between groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Callable, Optional

from glm_multiuser.engine.request import Request


class WaitingQueue:
    """First come, first served within a group; fair shares of the slots between groups."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Request]] = {}
        """Waiting requests by group, in the order of the groups' turns."""
        self._of_holder: Counter[Hashable] = Counter()
        """Number of waiting requests by holder; without those that have none."""

    def __len__(self) -> int:
        return sum(self.counts().values())

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._groups.values())

    def counts(self) -> dict[str, int]:
        """Number of waiting requests by group."""
        return {group: len(requests) for group, requests in self._groups.items()}

    def of_holder(self, holder: Hashable) -> int:
        """Number of waiting requests of this holder."""
        return self._of_holder[holder]

    def append(self, request: Request) -> None:
        self._groups.setdefault(request.group, []).append(request)
        self._of_holder[request.holder] += 1

    def put_first(self, requests: Iterable[Request]) -> None:
        """Inserts requests at the front of their groups, keeping their order. Those with saved
        caches run before all others."""
        placed: Counter[str] = Counter()
        for request in requests:
            self._groups.setdefault(request.group, []).insert(placed[request.group], request)
            placed[request.group] += 1
            self._of_holder[request.holder] += 1

    def remove(self, request: Request) -> None:
        requests = self._groups[request.group]
        requests.remove(request)
        if not requests:
            del self._groups[request.group]
        self._of_holder[request.holder] -= 1
        if not self._of_holder[request.holder]:
            del self._of_holder[request.holder]

    def next(
        self, running: Iterable[Request], may_run: Callable[[Request], bool]
    ) -> Optional[Request]:
        """The request that gets the next slot; None if none may run.

        Requests paused by a resize come first. Then it is the oldest request of the group with the
        fewest requests in slots; among several, of the group whose last turn was longest ago.
        """
        if not self._groups:
            return None
        busy = Counter(request.group for request in running)
        firsts = (next(filter(may_run, requests), None) for requests in self._groups.values())
        return min(
            (request for request in firsts if request is not None),
            key=lambda request: (request.saved_past is None, busy[request.group]),
            default=None,
        )

    def take(self, request: Request) -> None:
        """Removes a request that got a slot; its group's next turn comes after the others'."""
        self.remove(request)
        if request.group in self._groups:
            self._groups[request.group] = self._groups.pop(request.group)


def has_room(counts: Mapping[str, int], group: str, limit: int, beside: int = 0) -> bool:
    """Whether a group may have one more.

    A single group may use the whole limit. When it is reached, a group with less than its equal
    share may still have more: no group starves, and accepted requests stay accepted.
    n groups together have at most about limit * (1 + 1/2 + ... + 1/n).

    Args:
        counts: of each group; groups with none may be missing.
        group: that wants one more.
        limit: for all groups together.
        beside: temporary room in addition to the limit.
    """
    share = math.ceil(limit / len({*counts, group}))
    return sum(counts.values()) < limit + beside or counts.get(group, 0) < share
