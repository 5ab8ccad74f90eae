"""One request on its way through the server: its pieces, its deadline, and its account."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Callable, Optional

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.errors import GenerationError
from glm_multiuser.handle import AsyncHandle
from glm_multiuser.server.errors import Refusal

Leave = Callable[["Generation", str], None]
"""Hears once how it ended: "stop", "length", "cancelled", "error", or the code of a refusal."""


class Generation(AsyncIterator[Piece]):
    """Pieces of an answer as they come. Whoever holds it must `close` it, however it ended.

    Args:
        handle: of the engine.
        seconds: until the deadline.
        leave: hears of the end.
    """

    def __init__(self, handle: AsyncHandle, seconds: float, leave: Leave) -> None:
        self._handle = handle
        self._leave: Optional[Leave] = leave
        self._refusal: Optional[Refusal] = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    @property
    def number(self) -> int:
        """Of the request, as the engine counts."""
        return self._handle.number

    @property
    def result(self) -> Optional[GenerationResult]:
        """The whole answer, once the last piece has been read."""
        return self._handle.finished

    @property
    def waiting_pieces(self) -> int:
        """Pieces that can be read without waiting."""
        return self._handle.waiting_pieces

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
            Refusal: 504 at the deadline, 503 when the server ends.
            GenerationError: the request failed.
        """
        try:
            piece = await self._handle.__anext__()
        except GenerationError:
            self._end("error")
            raise
        if piece.finish_reason == "cancelled":
            refusal = self._refusal or Refusal(503, "cancelled", "the request was cancelled")
            self._end(refusal.code)
            raise refusal
        if piece.finish_reason is not None:
            self._end(piece.finish_reason)
        return piece

    async def finish(self) -> GenerationResult:
        """Reads to the end. Raises as iterating does."""
        async for _ in self:
            pass
        result = self.result
        if result is None:
            raise GenerationError("the request ended without a result")
        return result

    def abort(self, refusal: Refusal) -> None:
        """Ends the request; who reads it gets `refusal`."""
        self._refusal = self._refusal or refusal
        self._handle.cancel()

    def close(self) -> None:
        """Nobody reads any more: ends the request unless it has ended. May be called twice."""
        self._handle.close()
        self._end("cancelled")

    def _expire(self, seconds: float) -> None:
        self.abort(
            Refusal(504, "deadline_exceeded", f"the request took more than {seconds:g} seconds")
        )

    def _end(self, outcome: str) -> None:
        self._timer.cancel()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self, outcome)
