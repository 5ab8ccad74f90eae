"""Grammars are compiled on a thread of their own, of each API key one at a time."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

from glm_multiuser.engine.waiting import has_room
from glm_multiuser.errors import QueueFullError

Result = TypeVar("Result")


class GrammarQueue:
    """What waits for the compiler. Lives on the event loop.

    Other work has asyncio's threads for itself, and of a key at most one grammar is before those of
    other keys.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compile")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._counts: Counter[str] = Counter()

    async def run(self, key: str, limit: int, users: int, compile: Callable[[], Result]) -> Result:
        """The result of `compile`, called in the thread.

        Args:
            key: whose request it is; keys share the queue as they do the engine's.
            limit: how many may wait, as in the engine's queue.
            users: slots, for as many more.

        Raises:
            QueueFullError: as many wait as may wait.
            Exception: what `compile` raised.
        """
        if not has_room(self._counts, key, limit, users):
            waiting = sum(self._counts.values())
            raise QueueFullError(
                f"{waiting} grammars are waiting to be compiled; max_queue is {limit}"
            )
        self._counts[key] += 1
        try:
            async with self._turns[key]:
                context = contextvars.copy_context()
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, context.run, compile)
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]  # keys without any have no share

    def close(self) -> None:
        """Compiles nothing more."""
        self._thread.shutdown(wait=False)
