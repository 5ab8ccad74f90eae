"""Fair shares of the event loop between API keys."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Turns:
    """Starts the requests of each key one at a time, in order.

    Between two requests of a key, the event loop runs all other ready tasks, so a burst of one key
    delays others by its current request only.
    """

    def __init__(self) -> None:
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def wait(self, key: str) -> None:
        """Waits until a request of the key with this name may start."""
        async with self._starting[key]:
            await asyncio.sleep(0)
