"""A running request in the server: its pieces, deadline and outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Callable, Optional

from glm_multiuser.answer import GenerationResult, Piece, Usage
from glm_multiuser.errors import GenerationError
from glm_multiuser.handle import AsyncHandle
from glm_multiuser.server.errors import APIError, deadline_error

OnEnd = Callable[["Generation", str], None]
"""Called once with the outcome: "stop", "length", "cancelled", "error", or the code of an error."""


class Generation(AsyncIterator[Piece]):
    """Yields pieces of an answer as they arrive. Its owner must `close` it in any case.

    Args:
        handle: the engine's.
        seconds: time limit of the whole request.
        on_end: called once at the end.
        seconds_left: remaining part of it.
    """

    def __init__(
        self, handle: AsyncHandle, seconds: float, on_end: OnEnd, seconds_left: float
    ) -> None:
        self._handle = handle
        self._on_end: Optional[OnEnd] = on_end
        self._error: Optional[APIError] = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds_left, self._expire, seconds)

    @property
    def number(self) -> int:
        """Number of the request in the engine."""
        return self._handle.number

    @property
    def result(self) -> Optional[GenerationResult]:
        """The whole answer, once the last piece has been read."""
        return self._handle.finished

    @property
    def usage(self) -> Usage:
        """Token counts of what has been read so far."""
        return self._handle.usage

    @property
    def waiting_pieces(self) -> int:
        """Number of pieces that can be read without waiting."""
        return self._handle.waiting_pieces

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
            APIError: 504 at the deadline, 503 if the model or the server shuts down.
            GenerationError: the request failed.
        """
        try:
            piece = await self._handle.__anext__()
        except GenerationError:
            self._end("error")
            raise
        if piece.finish_reason == "cancelled":
            error = self._error or APIError(
                503, "cancelled", "the model was closed before the answer was complete"
            )
            self._end(error.code)
            raise error
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)
        return piece

    async def finish(self) -> GenerationResult:
        """Reads to the end and returns the result. Raises as iterating does."""
        async for _ in self:
            pass
        result = self.result
        if result is None:
            raise GenerationError("the request ended without a result")
        return result

    def abort(self, error: APIError) -> None:
        """Cancels the request; its reader gets `error`."""
        self._error = self._error or error
        self._handle.cancel()

    def close(self) -> None:
        """Cancels the request unless it has ended. May be called twice."""
        self._handle.close()
        self._end("cancelled")

    def _expire(self, seconds: float) -> None:
        self.abort(deadline_error(seconds))

    def _end(self, outcome: str) -> None:
        self._timer.cancel()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self, outcome)
