"""Requests in the form of Codex CLI and Claude Code are answered, over several turns.

The fields come from the API documentation and the clients' public sources; new client versions may
send more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from tests.server.anthropic_reading import EVENT as MESSAGES_EVENT
from tests.server.anthropic_reading import calls_of, text_of
from tests.server.asking import events_of
from tests.server.echoing import echo_llm
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import OPTIONS
from tests.server.test_responses_api import EVENT as RESPONSES_EVENT

FOLDER = Path(__file__).parent / "agent_requests"
REQUESTS = [
    pytest.param(request, id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text("utf-8"))["requests"])
]


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that says the last message, and calls a tool when that is a call."""
    with in_process_server(mock_settings(users=2, names=("echo",)), echo_llm) as server:
        yield server


def response_said(response: Response) -> tuple[str, list[str]]:
    calls = [item.name for item in response.output if item.type == "function_call"]
    return response.output_text, calls


def message_said(message: Message) -> tuple[str, list[str]]:
    return text_of(message), [name for name, _ in calls_of(message)]


def streamed_message(events: list[Any]) -> tuple[str, list[str]]:
    for one in events:
        if one["type"] != "ping":
            MESSAGES_EVENT.validate_python(one)
    texts = [one["delta"].get("text", "") for one in events if "delta" in one]
    blocks = [one["content_block"] for one in events if "content_block" in one]
    return "".join(texts), [block["name"] for block in blocks if block["type"] == "tool_use"]


@pytest.mark.parametrize("sent", REQUESTS)
def test_a_request_of_an_agent_is_answered(echo: InProcessServer, sent: Any) -> None:
    url, body, expected = echo.url + sent["path"], sent["body"], sent["expected"]
    response = httpx.post(url, json=body, headers=sent["headers"], **OPTIONS)
    assert response.status_code == 200, response.text
    if "input_tokens" in expected:
        assert response.json()["input_tokens"] > 0
        return
    wanted = (expected["text"], expected["calls"])
    is_response = "input" in body
    if body.get("stream"):
        events = events_of(response.text)
        if is_response:
            *_, last = [RESPONSES_EVENT.validate_python(one) for one in events]
            assert last.type == "response.completed"
            assert response_said(last.response) == wanted
        else:
            assert streamed_message(events) == wanted
    whole = httpx.post(url, json={**body, "stream": False}, headers=sent["headers"], **OPTIONS)
    assert whole.status_code == 200, whole.text
    if is_response:
        assert response_said(Response.model_validate(whole.json())) == wanted
    else:
        assert message_said(Message.model_validate(whole.json())) == wanted
