"""Parses responses of `/v1/*` with the official client, and strictly by its types."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar

import httpx
from openai import AsyncOpenAI, BaseModel, OpenAI
from openai.types import Completion
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageParam,
)

PATIENCE = 120.0
OPTIONS: Any = {
    "timeout": PATIENCE,
    "verify": False,
}  # reading certificates takes longer than asking
OTHER = "other"
"""The second model of the tested server."""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Parsed = TypeVar("Parsed", bound=BaseModel)


def sync_client(url: str, **options: Any) -> OpenAI:
    return OpenAI(**_options(url, options))


def async_client(url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(**_options(url, options))


def _options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
    return {"base_url": f"{url}/v1", **defaults, **options}


def question(text: str) -> list[ChatCompletionMessageParam]:
    """Messages with nothing before it."""
    return [{"role": "user", "content": text}]


def parse(kind: type[Parsed], data: Any, vendor: Iterable[str] = ()) -> Parsed:
    """Parses JSON strictly by a type of the client; of unknown fields only `vendor` is allowed."""
    parsed = kind.model_validate_json(json.dumps(data), strict=True)
    unknown = set(_unknown_fields(parsed)) - set(vendor)
    assert not unknown, f"{kind.__name__} has no {unknown}"
    return parsed


def _unknown_fields(value: Any) -> Iterable[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from _unknown_fields(one)


@dataclass
class Choice:
    """One answer, whole or joined from its chunks; calls as names and arguments."""

    text: str = ""
    finish_reason: Optional[str] = None
    logprobs: Any = None
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Answer:
    """A response, whole or joined from its chunks."""

    choices: dict[int, Choice]
    usage: Optional[dict[str, Any]]


def ask(url: str, path: str, **body: Any) -> Answer:
    """A whole response."""
    response = httpx.post(url + path, json=body, **OPTIONS)
    assert response.status_code == 200, response.text
    data = response.json()
    chat = path == CHAT
    if chat:
        parse(ChatCompletion, data, {"token_ids"})
    else:
        typed = [_as_typed(one) for one in data["choices"]]
        parse(Completion, {**data, "choices": typed}, {"token_ids"})
    assert data["object"] == ("chat.completion" if chat else "text_completion")
    choices = {
        one["index"]: Choice(
            _content(one["message"]) if chat else one["text"],
            one["finish_reason"],
            one["logprobs"],
            one.get("token_ids", []),
            _calls(one["message"]) if chat else [],
        )
        for one in data["choices"]
    }
    return Answer(choices, data["usage"])


def _as_typed(choice: dict[str, Any]) -> dict[str, Any]:
    """The client's type has no null for the first token of a prompt, OpenAI's API does."""
    if not choice["logprobs"]:
        return choice
    values = choice["logprobs"]["token_logprobs"]
    tops = choice["logprobs"]["top_logprobs"]
    if values and values[0] is None:
        values, tops = [0.0, *values[1:]], tops and [{}, *tops[1:]]
    known = {**choice["logprobs"], "token_logprobs": values, "top_logprobs": tops}
    return {**choice, "logprobs": known}


def _content(message: dict[str, Any]) -> str:
    assert message["content"] or (message["content"] is None) == ("tool_calls" in message)
    return message["content"] or ""


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def ask_streaming(url: str, path: str, **body: Any) -> Answer:
    """Joins a streamed response; fails if its chunks are not in OpenAI's format."""
    chunks = stream_chunks(url, path, **body)
    first = chunks[0]
    usage = None
    if (body.get("stream_options") or {}).get("include_usage"):
        *chunks, last = chunks
        assert last["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks)
        usage = last["usage"]
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        assert [chunk[key] for key in ("id", "object", "created", "model")] == [
            first[key] for key in ("id", "object", "created", "model")
        ]
        (entry,) = chunk["choices"]
        is_first = entry["index"] not in choices
        choice = choices.setdefault(entry["index"], Choice())
        assert choice.finish_reason is None, "something came after the end"
        _add(choice, entry, path, chunk, is_first)
    return Answer(choices, usage)


def _add(choice: Choice, entry: dict[str, Any], path: str, chunk: Any, is_first: bool) -> None:
    if path == CHAT:
        parse(ChatCompletionChunk, chunk, {"token_ids"})
        assert chunk["object"] == "chat.completion.chunk"
        assert entry["delta"].get("role") == ("assistant" if is_first else None)
        text = entry["delta"].get("content", "")
        calls = entry["delta"].get("tool_calls", [])
        for call in calls:
            _add_call(choice, call)
        assert (entry["delta"] == {}) == (entry["finish_reason"] is not None)
    else:
        # The client's type has no null here, OpenAI's API does.
        assert "finish_reason" in entry
        whole = {**chunk, "choices": [{**_as_typed(entry), "finish_reason": "stop"}]}
        parse(Completion, whole, {"token_ids"})
        assert chunk["object"] == "text_completion"
        text = entry["text"]
        calls = []
        is_first = False
    something = text or calls or entry["logprobs"] or entry.get("token_ids")
    something = something or entry["finish_reason"]
    assert something or is_first, "a chunk that says nothing"
    choice.text += text
    choice.finish_reason = entry["finish_reason"]
    choice.token_ids += entry.get("token_ids", [])
    choice.logprobs = _joined(choice.logprobs, entry["logprobs"])


def _add_call(choice: Choice, call: dict[str, Any]) -> None:
    """Starts a call, or continues the last one."""
    if "id" in call:
        assert call["index"] == len(choice.tool_calls)
        choice.tool_calls += _calls({"tool_calls": [call]})
        return
    assert call == {"index": len(choice.tool_calls) - 1, "function": call["function"]}
    name, arguments = choice.tool_calls[-1]
    assert set(call["function"]) == {"arguments"}
    choice.tool_calls[-1] = (name, arguments + call["function"]["arguments"])


def _joined(known: Any, new: Any) -> Any:
    if known is None or new is None:
        return known or new
    both = {}
    for name, values in known.items():
        both[name] = values if values is None else [*values, *new[name]]
    return both


def stream_chunks(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a complete stream."""
    *chunks, last = stream_events(url, path, **body)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def stream_events(url: str, path: str, **body: Any) -> list[str]:
    """The data of all events."""
    body = {**body, "stream": True}
    with httpx.stream("POST", url + path, json=body, **OPTIONS) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    return [line[len("data: ") :] for line in lines if line.startswith("data: ")]


def ask_both_ways(url: str, path: str, **body: Any) -> Answer:
    """The answer to a request, which must be identical streamed and not."""
    options = {"stream_options": {"include_usage": True}}
    whole, streamed = ask(url, path, **body), ask_streaming(url, path, **body, **options)
    for choice in whole.choices.values():
        if choice.logprobs is not None and not _any_entry(choice.logprobs):
            choice.logprobs = None  # a stream says nothing about no tokens
    assert streamed == whole
    return whole


def _any_entry(logprobs: dict[str, Any]) -> bool:
    return any(logprobs.values())
