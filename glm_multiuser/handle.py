"""A caller's handle of a running request: a stream of pieces that can be read or cancelled."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Callable, Generic, Optional, TypeVar

from glm_multiuser.answer import AnswerCollector, GenerationResult, Piece, Usage
from glm_multiuser.engine.request import Event
from glm_multiuser.errors import GenerationError, check_seconds

Self = TypeVar("Self", bound="RunningRequest[Any]")
Events = TypeVar("Events")


class RunningRequest(Generic[Events]):
    """What `Handle` and `AsyncHandle` have in common; they differ in how they wait.

    Closing it, leaving its `with` block, or dropping its last reference cancels the request.

    Args:
        answer: collects the events.
        events: where the engine puts them.
        cancel: tells the engine to end the request.
    """

    def __init__(self, answer: AnswerCollector, events: Events, cancel: Callable[[], None]) -> None:
        self._answer = answer
        self._events = events
        self._cancel = cancel

    @property
    def number(self) -> int:
        """Of this request; no other one of the process has it."""
        return self._answer.request.number

    @property
    def finished(self) -> Optional[GenerationResult]:
        """The result, once the last piece has been read; None before."""
        return self._answer.result

    @property
    def usage(self) -> Usage:
        """Counts of tokens so far, of what has been read."""
        return self._answer.usage

    def cancel(self) -> None:
        """Ends the request; its slot is free within two steps. Harmless at any moment."""
        self._cancel()

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if self._answer.result is None:
            self._cancel()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take(self, event: Event) -> Piece:
        piece, result = self._answer.take(event), self._answer.result
        # A stop string is found here; the engine does not know of it.
        if result is not None and result.finish_reason == "stop":
            self._cancel()
        return piece

    def _next(self, event: Event) -> Piece:
        piece, result = self._take(event), self._answer.result
        if result is not None and result.finish_reason == "error":
            raise result.error or GenerationError("the request failed")
        return piece


class Handle(RunningRequest[queue.SimpleQueue[Event]], Iterator[Piece]):
    """Iterate it for pieces, or ask for the result; both may be done, by one thread at a time."""

    def __next__(self) -> Piece:
        """The next piece; blocks until there is one.

        Raises:
            GenerationError: the request failed; what came before it stays valid.
        """
        if self._answer.result is not None:
            raise StopIteration
        return self._next(self._events.get())

    def result(self, timeout: Optional[float] = None) -> GenerationResult:
        """Waits for the end. A request that failed has finish_reason "error", and its error.

        Args:
            timeout: seconds to wait at most; None waits without a limit.

        Raises:
            TimeoutError: the request is still running; it goes on.
        """
        if timeout is not None:
            timeout = check_seconds("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._answer.result is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._events.get(timeout=remaining)
            except queue.Empty:
                raise TimeoutError(
                    f"the request is still running after {timeout:g} seconds"
                ) from None
            self._take(event)
        return self._answer.result


class AsyncHandle(RunningRequest[asyncio.Queue[Event]], AsyncIterator[Piece]):
    """`Handle` for asyncio: iterate it with `async for`, or await its result.

    It belongs to the event loop in which it was made.
    """

    @property
    def waiting_pieces(self) -> int:
        """Pieces that can be read without waiting."""
        return 0 if self._answer.result is not None else self._events.qsize()

    async def __anext__(self) -> Piece:
        """The next piece, as soon as there is one; raises as `Handle` does."""
        if self._answer.result is not None:
            raise StopAsyncIteration
        return self._next(await self._events.get())

    async def result(self) -> GenerationResult:
        """Waits for the end. A request that failed has finish_reason "error", and its error."""
        while self._answer.result is None:
            self._take(await self._events.get())
        return self._answer.result
