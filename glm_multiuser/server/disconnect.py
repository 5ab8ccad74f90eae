"""Detects clients that disconnect while nothing is being sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected; it appears in the log only."""


class ClientDisconnected(Exception):
    """The client closed its connection before the response was sent."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it as soon as the client disconnects.

    The body of the request must have been read, so that the next message is the disconnect.

    Raises:
        ClientDisconnected: the client disconnected.
        Exception: what `work` raised.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
