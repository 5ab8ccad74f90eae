"""An answer as events of `/v1/responses`, and as the response that they make."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Callable

from glm_multiuser.answer import Piece
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.events import event
from glm_multiuser.server.openai.adapter import AnswerEvents
from glm_multiuser.server.openai.generation_group import GenerationGroup
from glm_multiuser.server.openai.logprobs import chat_logprobs
from glm_multiuser.server.responses_api.requests import ResponseRequest

Event = dict[str, Any]
ECHOED = {
    *("instructions", "max_output_tokens", "previous_response_id", "temperature", "tool_choice"),
    *("top_logprobs", "top_p", "user"),
}
"""Fields of a request that its response has, too."""
TEXT = {"type": "text"}
TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


class ResponseEvents(AnswerEvents):
    """Makes the events of one answer.

    Args:
        group: with its generation.
        body: what was asked for.
        on_end: called with the response when it is complete, before its last event.

    Attributes:
        response: what the events so far make.
    """

    def __init__(
        self,
        group: GenerationGroup,
        body: ResponseRequest,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self.response = _begun(body, group.head)
        self._group = group
        self._tokens = group.tokens() if body.logprobs else None
        self._on_end = on_end
        self._numbers = itertools.count()
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Every event, as it comes."""
        yield self._event("created", response={**self.response, "output": []})
        yield self._event("in_progress", response={**self.response, "output": []})
        output: list[dict[str, Any]] = self.response["output"]
        async for _, piece in self._group.pieces():
            logprobs = self._logprobs_of(piece)
            if piece.text or logprobs:
                for one in () if output else self._begin_message():
                    yield one
                self._text += piece.text
                new = [_without_bytes(one) for one in logprobs]
                yield self._part_event("output_text.delta", delta=piece.text, logprobs=new)
        (result,) = self._group.results()
        status = "incomplete" if result.finish_reason == "length" else "completed"
        if not (output or result.tool_calls):
            for one in self._begin_message():
                yield one
        for one in self._end_message(status) if output else ():
            yield one
        for call in result.tool_calls:
            for one in self._call(call.name, call.arguments):
                yield one
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response.update(status=status, usage=_usage(self._group.usage()))
        self._on_end(self.response)
        yield self._event(status, response=self.response)

    def error_event(self, error: APIError) -> bytes:
        """The event for an error in the middle of a stream; nothing follows it."""
        failed = {"code": "server_error", "message": str(error)}
        self.response.update(status="failed", error=failed)
        last = self._event("failed", response=self.response)
        return event(last, last["type"])

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def _part_event(self, kind: str, **fields: Any) -> Event:
        at = {"item_id": self.response["output"][0]["id"], "output_index": 0, "content_index": 0}
        return self._event(kind, **at, **fields)

    def _begin_message(self) -> Iterator[Event]:
        item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message"}
        item.update(role="assistant", status="in_progress", content=[])
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=0, item={**item})
        yield self._part_event("content_part.added", part=_part("", []))

    def _end_message(self, status: str) -> Iterator[Event]:
        item, part = self.response["output"][0], _part(self._text, self._logprobs)
        logprobs = [_without_bytes(one) for one in self._logprobs]
        yield self._part_event("output_text.done", text=self._text, logprobs=logprobs)
        yield self._part_event("content_part.done", part=part)
        item.update(status=status, content=[part])
        yield self._event("output_item.done", output_index=0, item=item)

    def _call(self, name: str, arguments: str) -> Iterator[Event]:
        item_id, place = f"fc_{uuid.uuid4().hex}", len(self.response["output"])
        item = {"id": item_id, "type": "function_call", "call_id": f"call_{uuid.uuid4().hex}"}
        item.update(name=name, arguments=arguments, status="completed")
        self.response["output"].append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        at = {"item_id": item_id, "output_index": place}
        yield self._event("output_item.added", output_index=place, item=begun)
        yield self._event("function_call_arguments.delta", **at, delta=arguments)
        yield self._event("function_call_arguments.done", **at, name=name, arguments=arguments)
        yield self._event("output_item.done", output_index=place, item=item)

    def _logprobs_of(self, piece: Piece) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = []
        if self._tokens is not None and piece.logprobs:
            new = chat_logprobs(self._tokens, piece.logprobs)["content"]
        self._logprobs += new
        return new


def _begun(body: ResponseRequest, head: Mapping[str, Any]) -> dict[str, Any]:
    """A response without output: what was asked for."""
    given = body.model_dump(include=ECHOED)
    form = body.text_format
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
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else TEXT},
        "tool_choice": given["tool_choice"] or "auto",
        "tools": [tool.model_dump(include=TOOL_FIELDS) for tool in body.tools or ()],
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def _without_bytes(logprob: dict[str, Any]) -> dict[str, Any]:
    """As events have it."""
    best = [{name: one[name] for name in ("token", "logprob")} for one in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": best}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts of a chat by their names here."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
