"""The official client of the Messages API, and strict parsing of its responses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
from anthropic import Anthropic, AsyncAnthropic, BaseModel
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.openai_reading import OPTIONS, PATIENCE

MESSAGES = "/v1/messages"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def anthropic_client(url: str, **options: Any) -> Anthropic:
    return Anthropic(**_options(url, options))


def async_anthropic_client(url: str, **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(**_options(url, options))


def _options(url: str, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
    return {"base_url": url, **defaults, **options}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def named_events(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """The data of all events in a stream, each named by its type."""
    body = {**body, "stream": True}
    with httpx.stream("POST", url + path, json=body, **OPTIONS) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.read().decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def unknown_fields(value: Any) -> Iterable[str]:
    """Field names missing in the client's types."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from unknown_fields(one)
