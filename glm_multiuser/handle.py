"""Handles of running requests: streams of pieces that can be read or cancelled."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Callable, Generic, Optional, TypeVar

from glm_multiuser.answer import AnswerCollector, GenerationResult, Piece, Usage
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.request import Event
from glm_multiuser.errors import GenerationError, check_seconds

Self = TypeVar("Self", bound="RunningRequest[Any]")
Events = TypeVar("Events")


class RunningRequest(Generic[Events]):
    """Base class of `Handle` and `AsyncHandle`, which differ in how they wait.

    Closing it, leaving its `with` block, or dropping its last reference cancels the request.

    Args:
        answer: collects the events.
        events: queue that the engine fills.
        cancel: cancels the request in the engine.
    """

    def __init__(self, answer: AnswerCollector, events: Events, cancel: Callable[[], None]) -> None:
        self._answer = answer
        self._events = events
        self._cancel = cancel
        self._unread: deque[Piece] = deque()
        """Pieces that `result` has taken from the queue; iterated if it was interrupted."""

    @property
    def number(self) -> int:
        """The request's number, unique in the process."""
        return self._answer.request.number

    @property
    def finished(self) -> Optional[GenerationResult]:
        """The result, once the last piece has been read; None before."""
        return self._answer.result

    @property
    def usage(self) -> Usage:
        """Token counts of what has been read so far."""
        return self._answer.usage

    def cancel(self) -> None:
        """Cancels the request; its slot becomes free within two steps. May be called any time."""
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
        # The engine does not know about stop strings.
        if result is not None and result.finish_reason == "stop":
            self._cancel()
        return piece

    def _next(self, event: Event) -> Piece:
        piece, result = self._take(event), self._answer.result
        if result is not None and result.finish_reason == "error":
            raise result.error or GenerationError("the request failed")
        return piece


class Handle(RunningRequest[queue.SimpleQueue[Event]], Iterator[Piece]):
    """Iterate over its pieces, call `result`, or both; from one thread at a time."""

    def __next__(self) -> Piece:
        """Returns the next piece; blocks until there is one.

        Raises:
            GenerationError: the request failed; earlier pieces stay valid.
            EngineClosedError: in a forked process, where no more pieces arrive.
        """
        if self._answer.result is not None:
            raise StopIteration
        if self._unread:
            return self._unread.popleft()
        return self._next(self._event())

    def result(self, timeout: Optional[float] = None) -> GenerationResult:
        """Waits for the result. A failed request has finish_reason "error", and its error.

        Args:
            timeout: maximum wait in seconds; None: no limit.

        Raises:
            TimeoutError: the request is still running; it continues, and can be iterated without
                missing a piece.
            EngineClosedError: in a forked process, where no more pieces arrive.
        """
        if timeout is not None:
            timeout = check_seconds("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._answer.result is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._event(remaining)
            except queue.Empty:
                raise TimeoutError(
                    f"the request is still running after {timeout:g} seconds"
                ) from None
            self._unread.append(self._take(event))
        self._unread.clear()
        return self._answer.result

    def _event(self, timeout: Optional[float] = None) -> Event:
        if self._events.empty():
            DEVICE_THREAD.check_process()
        return self._events.get(timeout=timeout)


class AsyncHandle(RunningRequest[asyncio.Queue[Event]], AsyncIterator[Piece]):
    """`Handle` for asyncio: iterate with `async for`, or await its result.

    It belongs to the event loop that created it.
    """

    @property
    def waiting_pieces(self) -> int:
        """Pieces that can be read without waiting."""
        if self._answer.result is not None:
            return 0
        return len(self._unread) + self._events.qsize()

    async def __anext__(self) -> Piece:
        """Waits for the next piece; raises as `Handle` does."""
        if self._answer.result is not None:
            raise StopAsyncIteration
        if self._unread:
            return self._unread.popleft()
        return self._next(await self._events.get())

    async def result(self) -> GenerationResult:
        """Waits for the result. A failed request has finish_reason "error", and its error.

        If it is cancelled, as by `asyncio.wait_for`, the request continues, and can be iterated
        without missing a piece.
        """
        while self._answer.result is None:
            self._unread.append(self._take(await self._events.get()))
        self._unread.clear()
        return self._answer.result
