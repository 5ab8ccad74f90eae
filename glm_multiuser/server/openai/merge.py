"""Merges the streams of several generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Union

from glm_multiuser.answer import Piece

Arrival = tuple[int, Piece]
"""Index of the answer, and the piece."""


async def merged(answers: Sequence[AsyncIterator[Piece]]) -> AsyncGenerator[Arrival, None]:
    """Yields the pieces of all answers as they arrive, those of one answer in order.

    Raises:
        Exception: that of the first answer to fail; the others are not read further.
    """
    if len(answers) == 1:
        async for piece in answers[0]:
            yield 0, piece
        return
    arrivals: asyncio.Queue[Union[Arrival, Exception, None]] = asyncio.Queue()

    async def forward(index: int, answer: AsyncIterator[Piece]) -> None:
        try:
            async for piece in answer:
                arrivals.put_nowait((index, piece))
            arrivals.put_nowait(None)
        except Exception as error:
            arrivals.put_nowait(error)

    forwarding = [
        asyncio.ensure_future(forward(index, answer)) for index, answer in enumerate(answers)
    ]
    running = len(forwarding)
    try:
        while running:
            arrival = await arrivals.get()
            if arrival is None:
                running -= 1
            elif isinstance(arrival, Exception):
                raise arrival
            else:
                yield arrival
    finally:
        for task in forwarding:
            task.cancel()
        await asyncio.gather(*forwarding, return_exceptions=True)
