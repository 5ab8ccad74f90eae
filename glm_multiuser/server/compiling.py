"""Compiles grammars on a dedicated thread, one at a time per API key."""

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
    """The queue of grammars to compile. Used on the event loop only.

    asyncio's own threads stay free for other work, and at most one grammar of each key is ahead of
    those of other keys.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compile")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._counts: Counter[str] = Counter()

    async def run(self, key: str, limit: int, users: int, compile: Callable[[], Result]) -> Result:
        """Runs `compile` in the thread and returns its result.

        Args:
            key: API key of the request; keys share the queue as they do the engine's.
            limit: maximum number of waiting grammars, as in the engine's queue.
            users: number of slots, added to the limit.

        Raises:
            QueueFullError: the queue is full.
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
                del self._counts[key]  # keys without grammars get no share

    def close(self) -> None:
        """Accepts no more grammars; does not wait for the thread."""
        self._thread.shutdown(wait=False)
