"""Streams the chunks of a response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, Callable

from glm_multiuser.answer import Piece
from glm_multiuser.server.errors import APIError, openai_body
from glm_multiuser.server.events import EventStream, event
from glm_multiuser.server.large_json import encode_large
from glm_multiuser.server.openai.generation_group import GenerationGroup

DONE = b"data: [DONE]\n\n"

ChoicesOf = Callable[[int, Piece], Iterable[dict[str, Any]]]
"""Returns the choices for a piece of the answer with this index, each for a chunk of its own."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def stream(group: GenerationGroup, choices_of: ChoicesOf, include_usage: bool) -> EventStream:
    """Returns the response to a request with `stream`."""
    return EventStream(_events(group, choices_of, include_usage), group.generations, error_event)


async def _events(
    group: GenerationGroup, choices_of: ChoicesOf, include_usage: bool
) -> AsyncIterator[bytes]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    # Chunks differ only in their choice, except the last, so the rest is encoded once.
    before, after = event({**group.head, "choices": ["here"], **usage}).split(b'"here"')

    def chunks(index: int, piece: Piece, encode: Callable[[object], str]) -> list[bytes]:
        choices = choices_of(index, piece)
        return [before + encode(choice).encode("ascii") + after for choice in choices]

    async for index, piece in group.pieces():
        if piece.prompt_logprobs is None:
            made = chunks(index, piece, _encode)
        else:  # those of a long prompt take a second to write
            made = await asyncio.to_thread(chunks, index, piece, encode_large)
        for one in made:
            yield one
    if include_usage:
        yield event({**group.head, "choices": [], "usage": group.usage()})
    yield DONE


def error_event(error: APIError) -> bytes:
    """Encodes an error in the middle of a stream, as its last event."""
    return event(openai_body(error))
