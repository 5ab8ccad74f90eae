"""What a caller holds of a running request: a stream of pieces that can be read or cancelled."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Callable, Optional

from glm_multiuser.answer import Answer, GenerationResult, Piece
from glm_multiuser.engine.request import Event
from glm_multiuser.errors import GenerationError


class Handle(Iterator[Piece]):
    """Iterate it for pieces, or ask for the result; both may be done, by one thread at a time.

    Closing it, leaving its `with` block, or dropping its last reference cancels the request.

    Args:
        answer: collects the events.
        events: where the engine puts them.
        cancel: tells the engine to end the request.
    """

    def __init__(
        self, answer: Answer, events: queue.SimpleQueue[Event], cancel: Callable[[], None]
    ) -> None:
        self._answer = answer
        self._events = events
        self._cancel = cancel

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
        self._stop_if_ended_early()
        return self._answer.result

    def cancel(self) -> None:
        """Ends the request; its slot is free within two steps. Harmless at any moment."""
        self._cancel()

    def close(self) -> None:
        """Cancels the request unless it has ended."""
        if self._answer.result is None:
            self._cancel()

    def __enter__(self) -> Handle:
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
            self._stop_if_ended_early()
            if result.finish_reason == "error":
                raise result.error or GenerationError("the request failed")
        return piece

    def _stop_if_ended_early(self) -> None:
        # A stop string is found here; the engine does not know of it.
        result = self._answer.result
        if result is not None and result.finish_reason == "stop":
            self._cancel()
