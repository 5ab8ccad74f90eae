"""What a caller holds of a running request: a stream of pieces that can be read or cancelled."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Callable, Optional, TypeVar

from glm_multiuser.answer import Answer, GenerationResult, Piece
from glm_multiuser.engine.request import Event
from glm_multiuser.errors import GenerationError

Self = TypeVar("Self", bound="RunningRequest")


class RunningRequest:
    """What `Handle` and `AsyncHandle` have in common; they differ in how they wait.

    Closing it, leaving its `with` block, or dropping its last reference cancels the request.

    Args:
        answer: collects the events.
        cancel: tells the engine to end the request.
    """

    def __init__(self, answer: Answer, cancel: Callable[[], None]) -> None:
        self._answer = answer
        self._cancel = cancel

    @property
    def number(self) -> int:
        """Of this request; no other one of the process has it."""
        return self._answer.request.number

    @property
    def finished(self) -> Optional[GenerationResult]:
        """The result, once the last piece has been read; None before."""
        return self._answer.result

    def cancel(self) -> None:
        """Ends the request; its slot is free within two steps. Harmless at any moment."""
        self._cancel()

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if self._answer.result is None:
            self._cancel()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _take(self, event: Event) -> Piece:
        piece = self._answer.take(event)
        result = self._answer.result
        if result is not None:
            self._stop_if_ended_early(result)
            if result.finish_reason == "error":
                raise result.error or GenerationError("the request failed")
        return piece

    def _stop_if_ended_early(self, result: GenerationResult) -> None:
        # A stop string is found here; the engine does not know of it.
        if result.finish_reason == "stop":
            self._cancel()


class Handle(RunningRequest, Iterator[Piece]):
    """Iterate it for pieces, or ask for the result; both may be done, by one thread at a time.

    Args:
        answer: collects the events.
        events: where the engine puts them.
        cancel: tells the engine to end the request.
    """

    def __init__(
        self, answer: Answer, events: queue.SimpleQueue[Event], cancel: Callable[[], None]
    ) -> None:
        super().__init__(answer, cancel)
        self._events = events

    def __next__(self) -> Piece:
        """The next piece; blocks until there is one.

        Raises:
            GenerationError: the request failed; what came before it stays valid.
        """
        if self._answer.result is not None:
            raise StopIteration
        return self._take(self._events.get())

    def result(self, timeout: Optional[float] = None) -> GenerationResult:
        """Waits for the end. A request that failed has finish_reason "error", and its error.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: the request is still running; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._answer.result is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._events.get(timeout=remaining)
            except queue.Empty:
                raise TimeoutError(
                    f"the request is still running after {timeout} seconds"
                ) from None
            self._answer.take(event)
        self._stop_if_ended_early(self._answer.result)
        return self._answer.result


class AsyncHandle(RunningRequest, AsyncIterator[Piece]):
    """`Handle` for asyncio: iterate it with `async for`, or await its result.

    It belongs to the event loop in which it was made. The arguments are those of `Handle`.
    """

    def __init__(
        self, answer: Answer, events: asyncio.Queue[Event], cancel: Callable[[], None]
    ) -> None:
        super().__init__(answer, cancel)
        self._events = events

    @property
    def waiting_pieces(self) -> int:
        """Pieces that can be read without waiting."""
        return 0 if self._answer.result is not None else self._events.qsize()

    async def __anext__(self) -> Piece:
        """The next piece, as soon as there is one.

        Raises:
            GenerationError: the request failed; what came before it stays valid.
        """
        if self._answer.result is not None:
            raise StopAsyncIteration
        return self._take(await self._events.get())

    async def result(self) -> GenerationResult:
        """Waits for the end. A request that failed has finish_reason "error", and its error."""
        while self._answer.result is None:
            self._answer.take(await self._events.get())
        self._stop_if_ended_early(self._answer.result)
        return self._answer.result
