"""An answer as events of the Messages API, and as the message that they make."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import ServerSentEvent

from glm_multiuser.answer import GenerationResult, Usage
from glm_multiuser.server.errors import APIError, anthropic_body
from glm_multiuser.server.events import event
from glm_multiuser.server.openai.adapter import AnswerEvents
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.tokenizers.calls import read_json_arguments

Event = dict[str, Any]
PING = {"type": "ping"}


class MessageEvents(AnswerEvents):
    """Makes the events of one answer.

    Args:
        group: with its generation.

    Attributes:
        message: what the events so far make.
    """

    def __init__(self, group: GenerationGroup) -> None:
        self._group = group
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": group.head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The first one has the counts of the prompt's tokens."""
        content: list[dict[str, Any]] = self.message["content"]
        generation = self._group.generations[0]
        begun = False
        async for _, piece in self._group.pieces():
            if not begun:
                begun = True
                usage = {**_usage(generation.usage), "output_tokens": 0}
                yield {
                    "type": "message_start",
                    "message": {**self.message, "content": [], "usage": usage},
                }
                yield PING
            if piece.text:
                if not content:
                    content.append({"type": "text", "text": ""})
                    yield _start(0, dict(content[0]))
                content[0]["text"] += piece.text
                yield _delta(0, {"type": "text_delta", "text": piece.text})
        if content:
            yield _stop(0)
        (result,) = self._group.results()
        for call in result.tool_calls:
            place = len(content)
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name}
            # An answer that max_tokens ends may end in a call: then there is no JSON.
            content.append({**block, "input": read_json_arguments(call.arguments) or {}})
            yield _start(place, {**block, "input": {}})
            yield _delta(place, {"type": "input_json_delta", "partial_json": call.arguments})
            yield _stop(place)
        end = {"stop_reason": _stop_reason(result), "stop_sequence": None}
        if end["stop_reason"] == "stop_sequence":
            end["stop_sequence"] = result.stop_string
        self.message.update(end, usage=_usage(result.usage))
        yield {"type": "message_delta", "delta": end, "usage": self.message["usage"]}
        yield {"type": "message_stop"}


def error_event(error: APIError) -> bytes:
    """The event for an error in the middle of a stream; nothing follows it."""
    return event(anthropic_body(error), "error")


def ping_event() -> ServerSentEvent:
    """What keeps the connection alive."""
    return ServerSentEvent(json.dumps(PING), event="ping", sep="\n")


def _start(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _stop(index: int) -> Event:
    return {"type": "content_block_stop", "index": index}


def _stop_reason(result: GenerationResult) -> str:
    if result.finish_reason == "length":
        return "max_tokens"
    if result.tool_calls:
        return "tool_use"
    return "end_turn" if result.stop_string is None else "stop_sequence"


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
