"""Converts an answer to events of `/v1/responses`, and to a response."""

from __future__ import annotations

import copy
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Callable

from glm_multiuser.answer import GenerationResult, Piece, Usage
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.events import event
from glm_multiuser.server.openai.answer_parts import AnswerEvents, Event
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.server.openai.logprobs import chat_logprobs
from glm_multiuser.server.responses_api.requests import ResponseRequest
from glm_multiuser.server.responses_api.tools import called_functions, shown_tools
from glm_multiuser.tokenizers.calls import read_json_arguments

ECHOED = {
    *("instructions", "max_output_tokens", "previous_response_id", "temperature", "tool_choice"),
    *("top_logprobs", "top_p", "user"),
}
"""Request fields that the response repeats."""
OnEnd = Callable[[dict[str, Any]], None]


class ResponseEvents(AnswerEvents):
    """Generates the events of one answer.

    Args:
        group: with a single generation.
        body: of the request.
        on_end: called with the complete response, before its last event.

    Attributes:
        response: assembled from the events so far.
    """

    def __init__(self, group: GenerationGroup, body: ResponseRequest, on_end: OnEnd) -> None:
        super().__init__(group, body.logprobs)
        self.response = _begun(body, group.head)
        self._output: list[dict[str, Any]] = self.response["output"]
        self._tokens = group.tokens()
        self._called = called_functions(body.tools or ())
        self._on_end = on_end
        self._numbers = itertools.count()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response={**self.response, "output": []})
        async for one in super().__aiter__():
            yield one

    def begin_text(self) -> Iterable[Event]:
        content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": ""}]
        message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        yield self._begin_item({**message, "content": content}, content=[])
        yield self._part_event("content_part.added", part=copy.deepcopy(content[0]))

    def add_text(self, piece: Piece) -> Iterable[Event]:
        part = self._output[-1]["content"][0]
        logprobs = chat_logprobs(self._tokens, piece.logprobs or ())["content"]
        part["text"] += piece.text
        part["logprobs"] += logprobs
        shown = _without_bytes(logprobs)
        yield self._part_event("output_text.delta", delta=piece.text, logprobs=shown)

    def end_text(self, is_cut: bool) -> Iterable[Event]:
        part = self._output[-1]["content"][0]
        shown = _without_bytes(part["logprobs"])
        yield self._part_event("output_text.done", text=part["text"], logprobs=shown)
        yield self._part_event("content_part.done", part=part)
        yield self._end_item(is_cut)

    def begin_call(self, name: str) -> Iterable[Event]:
        ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex}"}
        called = self._called.get(name, {"name": name})
        yield self._begin_item({**ids, "type": "function_call", **called, "arguments": ""})

    def add_arguments(self, text: str) -> Iterable[Event]:
        self._output[-1]["arguments"] += text
        yield self._item_event("function_call_arguments.delta", delta=text)

    def end_call(self) -> Iterable[Event]:
        name, arguments = self._output[-1]["name"], self._output[-1]["arguments"]
        yield self._item_event("function_call_arguments.done", name=name, arguments=arguments)
        yield self._end_item(read_json_arguments(arguments) is None)

    def end(self, result: GenerationResult) -> Iterable[Event]:
        is_cut = result.finish_reason == "length"
        if not self._output:
            yield from self.begin_text()
            yield from self.end_text(is_cut)
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.response.update(status=status, incomplete_details=details, usage=_usage(result.usage))
        self._on_end(self.response)
        yield self._event(status, response=self.response)

    def error_event(self, error: APIError) -> bytes:
        """Encodes an error in the middle of a stream, as its last event."""
        failed = {"code": "server_error", "message": str(error)}
        for item in self._output:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"
        self.response.update(status="failed", error=failed)
        last = self._event("failed", response=self.response)
        return event(last, last["type"])

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        at = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **at, **fields)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, content_index=0, **fields)

    def _begin_item(self, item: dict[str, Any], **shown: Any) -> Event:
        item["status"] = "in_progress"
        self._output.append(item)
        place = len(self._output) - 1
        return self._event("output_item.added", output_index=place, item={**item, **shown})

    def _end_item(self, is_cut: bool) -> Event:
        item = self._output[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)


def _begun(body: ResponseRequest, head: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a response without output, from the fields of the request."""
    given = body.model_dump(include=ECHOED)
    return {
        **given,
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None},
        "store": bool(body.store),
        "text": {"format": body.text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": shown_tools(body.tools or ()),
        "truncation": "disabled",
        "usage": None,
    }


def _without_bytes(logprobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts log-probabilities for events, which omit `bytes`."""
    return [
        {**_plain(one), "top_logprobs": [*map(_plain, one["top_logprobs"])]} for one in logprobs
    ]


def _plain(logprob: dict[str, Any]) -> dict[str, Any]:
    return {name: logprob[name] for name in ("token", "logprob")}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
