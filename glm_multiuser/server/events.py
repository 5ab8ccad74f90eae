"""Server-sent events; a stream cancels its requests when the client disconnects."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Callable, Optional

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.errors import APIError, api_error_of
from glm_multiuser.server.generation import Generation

logger = logging.getLogger(__name__)

PING_SECONDS = 15
NAMED_EVENTS = ("/v1/messages", "/v1/responses")
"""Path prefixes of the protocols whose events have names."""


def event(data: Any, name: Optional[str] = None) -> bytes:
    """Encodes an event with JSON data. ASCII: some clients end a line at U+2028 or U+0085."""
    return encoded_event(json.dumps(data, separators=(",", ":"), allow_nan=False), name)


def encoded_event(text: str, name: Optional[str] = None) -> bytes:
    """Makes an event of JSON text."""
    content = b"data: " + text.encode("ascii") + b"\n\n"
    return content if name is None else b"event: " + name.encode("ascii") + b"\n" + content


class EventStream(EventSourceResponse):
    """Sends events as they arrive, and detects when the client disconnects.

    Args:
        events: encoded by `event`.
        generations: closed at the end, also after an error or a disconnect.
        error_event: encodes an error in the middle of a stream for this protocol.
        ping: creates keep-alive events; default: comments.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        generations: Sequence[Generation],
        error_event: Callable[[APIError], bytes],
        ping: Optional[Callable[[], ServerSentEvent]] = None,
    ) -> None:
        super().__init__(
            _with_errors(events, error_event),
            ping=PING_SECONDS,
            ping_message_factory=ping,
            sep="\n",
        )
        del self.headers["connection"]  # keep-alive; uvicorn decides whether the connection closes
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Not in the generator: if it was never started, it runs no `finally`.
            for generation in self._generations:
                generation.close()


async def _with_errors(
    events: AsyncIterator[bytes], error_event: Callable[[APIError], bytes]
) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield one
    except GLMMultiUserError as error:
        yield error_event(api_error_of(error))
    except Exception as error:
        logger.exception("a stream failed")
        yield error_event(api_error_of(error))
