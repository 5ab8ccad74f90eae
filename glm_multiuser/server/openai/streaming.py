"""Chunks of a response, as an event stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, Callable

from glm_multiuser.answer import Piece
from glm_multiuser.server.errors import Refusal, openai_body
from glm_multiuser.server.events import EventStream, event
from glm_multiuser.server.openai.running import Answers

DONE = b"data: [DONE]\n\n"

ChoicesOf = Callable[[int, Piece], Iterable[dict[str, Any]]]
"""The entries of `choices`, one for each chunk that a piece of the answer of this number makes."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def stream(answers: Answers, choices_of: ChoicesOf, include_usage: bool) -> EventStream:
    """The response to a request with `stream`."""
    return EventStream(_events(answers, choices_of, include_usage), answers.generations, error)


async def _events(
    answers: Answers, choices_of: ChoicesOf, include_usage: bool
) -> AsyncIterator[bytes]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    # Every chunk but the last is the same around its only choice.
    before, after = event({**answers.head, "choices": ["here"], **usage}).split(b'"here"')
    async for index, piece in answers.pieces():
        for choice in choices_of(index, piece):
            yield before + _encode(choice).encode("ascii") + after
    if include_usage:
        yield event({**answers.head, "choices": [], "usage": answers.usage()})
    yield DONE


def error(refusal: Refusal) -> bytes:
    """How an error in the middle of a stream is told; nothing comes after it."""
    return event(openai_body(refusal))
