"""Converts an answer to events of the Messages API, and to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from sse_starlette import ServerSentEvent

from glm_multiuser.answer import GenerationResult, Piece, Usage
from glm_multiuser.server.errors import APIError, anthropic_body
from glm_multiuser.server.events import event
from glm_multiuser.server.openai.answer_parts import AnswerEvents, Event
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.tokenizers.calls import read_json_arguments

PING = {"type": "ping"}


class MessageEvents(AnswerEvents):
    """Generates the events of one answer; the first one has the token counts of the prompt.

    Attributes:
        message: assembled from the events so far.
    """

    def __init__(self, group: GenerationGroup) -> None:
        super().__init__(group)
        self._content: list[dict[str, Any]] = []
        self._arguments = ""
        self.message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": group.head["model"],
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> Iterable[Event]:
        usage = {**_usage(self.group.generations[0].usage), "output_tokens": 0}
        message = {**self.message, "content": [], "usage": usage}
        return {"type": "message_start", "message": message}, PING

    def begin_text(self) -> Iterable[Event]:
        return [self._begin({"type": "text", "text": ""})]

    def add_text(self, piece: Piece) -> Iterable[Event]:
        self._content[-1]["text"] += piece.text
        return [self._delta({"type": "text_delta", "text": piece.text})]

    def end_text(self, is_cut: bool) -> Iterable[Event]:
        return [self._block_event("stop")]

    def begin_call(self, name: str) -> Iterable[Event]:
        self._arguments = ""
        call_id = f"toolu_{uuid.uuid4().hex}"
        return [self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})]

    def add_arguments(self, text: str) -> Iterable[Event]:
        self._arguments += text
        return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def end_call(self) -> Iterable[Event]:
        self._content[-1]["input"] = read_json_arguments(self._arguments) or {}
        return [self._block_event("stop")]

    def end(self, result: GenerationResult) -> Iterable[Event]:
        end = {"stop_reason": _stop_reason(result), "stop_sequence": None}
        if end["stop_reason"] == "stop_sequence":
            end["stop_sequence"] = result.stop_string
        self.message.update(end, usage=_usage(result.usage))
        usage = self.message["usage"]
        return {"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}

    def _begin(self, block: dict[str, Any]) -> Event:
        self._content.append(block)
        return self._block_event("start", content_block={**block})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return self._block_event("delta", delta=delta)

    def _block_event(self, kind: str, **fields: Any) -> Event:
        index = len(self._content) - 1
        return {"type": f"content_block_{kind}", "index": index, **fields}


def error_event(error: APIError) -> bytes:
    """Encodes an error in the middle of a stream, as its last event."""
    return event(anthropic_body(error), "error")


def ping_event() -> ServerSentEvent:
    """Returns the event that keeps the connection alive."""
    return ServerSentEvent(json.dumps(PING), event="ping", sep="\n")


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
