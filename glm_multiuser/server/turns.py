"""Fair shares of the event loop between API keys."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Turns:
    """Lets one request of each key start at a time, in their order.

    Between two requests of a key the event loop runs everything else that is ready, so a burst of
    one key delays others by its current request, and not by all of them.
    """

    def __init__(self) -> None:
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def wait(self, key: str) -> None:
        """Returns when a request of the key with this name may start."""
        async with self._starting[key]:
            await asyncio.sleep(0)
