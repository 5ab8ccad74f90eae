"""Splits an answer into consecutive parts, texts and calls, for protocols that stream parts."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Optional

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.server.events import encoded_event, event
from glm_multiuser.server.large_json import encode_large
from glm_multiuser.server.openai.generation_group import GenerationGroup

Event = dict[str, Any]
TEXT = -1
"""Stands for text, instead of a call's index."""


class AnswerEvents(AsyncIterable[Event]):
    """Generates the typed events of one answer, and assembles the complete answer.

    Iterating raises GLMMultiUserError if the answer failed or the server ended it.

    Args:
        group: with a single generation.
        logprobs: whether to send log-probabilities, which may arrive without text.
    """

    def __init__(self, group: GenerationGroup, logprobs: bool = False) -> None:
        self.group = group
        self._logprobs = logprobs
        self._open: Optional[int] = None

    def begin(self) -> Iterable[Event]:
        """Returns the events before all parts, when the first token has arrived."""
        return ()

    @abstractmethod
    def begin_text(self) -> Iterable[Event]: ...
    @abstractmethod
    def add_text(self, piece: Piece) -> Iterable[Event]: ...
    @abstractmethod
    def end_text(self, is_cut: bool) -> Iterable[Event]: ...
    @abstractmethod
    def begin_call(self, name: str) -> Iterable[Event]: ...
    @abstractmethod
    def add_arguments(self, text: str) -> Iterable[Event]: ...
    @abstractmethod
    def end_call(self) -> Iterable[Event]:
        """Ends a call; if the answer ends inside it, the arguments are not valid JSON."""

    @abstractmethod
    def end(self, result: GenerationResult) -> Iterable[Event]:
        """Returns the events after all parts."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        has_begun = False
        async for _, piece in self.group.pieces():
            for one in () if has_begun else self.begin():
                yield one
            has_begun = True
            for one in self._of(piece):
                yield one
        (result,) = self.group.results()
        for one in self._close(result.finish_reason == "length"):
            yield one
        for one in self.end(result):
            yield one

    async def encoded(self) -> AsyncIterator[bytes]:
        """Yields the events, encoded for an event stream."""
        async for one in self:
            kind = one["type"]
            if self._logprobs and not kind.endswith(".delta"):  # those of the whole answer
                yield encoded_event(await asyncio.to_thread(encode_large, one), kind)
            else:
                yield event(one, kind)

    async def read(self) -> None:
        """Reads the answer to its end. Raises as iterating does."""
        async for _ in self:
            pass

    def _of(self, piece: Piece) -> Iterator[Event]:
        is_in_call = self._open is not None and self._open != TEXT
        if piece.text or (self._logprobs and piece.logprobs and not is_in_call):
            if self._open != TEXT:
                yield from self._close()
                self._open = TEXT
                yield from self.begin_text()
            yield from self.add_text(piece)
        for call in piece.calls:
            if self._open != call.index:
                yield from self._close()
                self._open = call.index
                yield from self.begin_call(call.name)
            if call.arguments:
                yield from self.add_arguments(call.arguments)

    def _close(self, is_cut: bool = False) -> Iterable[Event]:
        """Ends the open part, if any."""
        is_open, is_text, self._open = self._open is not None, self._open == TEXT, None
        if not is_open:
            return ()
        return self.end_text(is_cut) if is_text else self.end_call()
