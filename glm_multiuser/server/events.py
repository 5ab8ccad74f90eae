"""Event streams (text/event-stream) that end their requests when nobody reads them any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Callable, Protocol

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.connections import ABORT
from glm_multiuser.server.errors import Refusal, refusal_of

logger = logging.getLogger(__name__)

PING_SECONDS = 15
SEND_SECONDS = 60.0
"""A reader that takes nothing for so long is gone."""


class Closing(Protocol):
    def close(self) -> None: ...


def event(data: Any) -> bytes:
    """One event with JSON in it. ASCII: some clients end a line at U+2028 or U+0085."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream(EventSourceResponse):
    """Sends events as they come, and watches meanwhile whether the client is still there.

    Args:
        events: encoded by `event`.
        running: closed at the end, however it came.
        error_event: how this protocol tells an error in the middle of a stream.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        running: Sequence[Closing],
        error_event: Callable[[Refusal], bytes],
    ) -> None:
        super().__init__(
            _with_errors(events, error_event),
            ping=PING_SECONDS,
            sep="\n",
            send_timeout=SEND_SECONDS,
        )
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception as error:
            if not isinstance(_only_one(error), SendTimeoutError):
                raise
            logger.warning("a reader took nothing for %g seconds", SEND_SECONDS)
            scope["state"][ABORT]()
            await asyncio.sleep(0)  # until the connection knows that it is closed
        finally:
            # Here and not in the generator: one that was never started runs no `finally`.
            for one in self._running:
                one.close()


def _only_one(error: BaseException) -> BaseException:
    """What a task group holds; sse-starlette for Python 3.9 and 3.10 does not unwrap it."""
    inside: Sequence[BaseException] = getattr(error, "exceptions", ())
    return _only_one(inside[0]) if len(inside) == 1 else error


async def _with_errors(
    events: AsyncIterator[bytes], error_event: Callable[[Refusal], bytes]
) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield one
    except GLMMultiUserError as error:
        yield error_event(refusal_of(error))
    except Exception as error:
        logger.exception("a stream failed")
        yield error_event(refusal_of(error))
