"""An answer for protocols that send it in parts: a text, or calls, one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Optional

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.server.events import event
from glm_multiuser.server.openai.generation_group import GenerationGroup

Event = dict[str, Any]
TEXT = -1
"""In the place of a call's index."""


class AnswerEvents(AsyncIterable[Event]):
    """Makes the events of one answer, each with its type, and what they are together.

    Iterating raises GLMMultiUserError when the answer failed, or the server ended it.

    Args:
        group: with its generation.
        logprobs: whether log-probabilities are sent; they may come without text.
    """

    def __init__(self, group: GenerationGroup, logprobs: bool = False) -> None:
        self.group = group
        self._logprobs = logprobs
        self._open: Optional[int] = None

    def begin(self) -> Iterable[Event]:
        """Before all parts, when the first token has come."""
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
        """Of an answer that ends inside a call, the arguments so far are no JSON."""

    @abstractmethod
    def end(self, result: GenerationResult) -> Iterable[Event]:
        """After all parts."""

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
        """For an event stream."""
        async for one in self:
            yield event(one, one["type"])

    async def read(self) -> None:
        """Reads to the end of the answer. Raises as iterating does."""
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
        """Ends the open part, if there is one."""
        is_open, is_text, self._open = self._open is not None, self._open == TEXT, None
        if not is_open:
            return ()
        return self.end_text(is_cut) if is_text else self.end_call()
