"""Recorded requests of real clients, byte for byte or field for field, are answered.

`tests/clients` runs these clients; `python -m tests.clients.record` rewrites the recordings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.running import CLIENTS
from tests.server.asking import events_of
from tests.server.echoing import echo_llm
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import OPTIONS

RECORDED = Path(__file__).parent / "recorded_clients"


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that says the last message, and calls a tool when that is a call."""
    with in_process_server(mock_settings(users=2, names=("echo",)), echo_llm) as server:
        yield server


def said(response: httpx.Response, stream: bool) -> tuple[str, list[str]]:
    """The content of an answer, and the names of the tools that it calls."""
    assert response.status_code == 200, response.text
    if not stream:
        message = response.json()["choices"][0]["message"]
        messages = [message]
    else:
        choices = [one for event in events_of(response.text) for one in event["choices"]]
        messages = [choice["delta"] for choice in choices]
    content = "".join(message.get("content") or "" for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return content, [call["function"]["name"] for call in calls]


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")), ids=lambda file: file.stem)
def test_every_request_is_answered(echo: InProcessServer, file: Path) -> None:
    recorded = json.loads(file.read_text("utf-8"))
    answers = []
    for request in recorded["requests"]:
        body = request["body"]
        # `Upgrade` and `Connection` are for one connection: test_upgrades.py has them.
        headers = {
            name: value
            for name, value in request["headers"].items()
            if name not in ("connection", "upgrade", "http2-settings")
        }
        response = httpx.request(
            request["method"], echo.url + request["path"], json=body, headers=headers, **OPTIONS
        )
        content, called = said(response, bool(body.get("stream")))
        asked = text_of(body["messages"][-1])
        if asked.startswith("get_time"):
            assert (content, called) == ("", ["get_time"])
        else:
            assert (content, called) == (asked.strip(), [])
            answers.append(content)
    assert answers == recorded["answers"]


def test_there_is_a_recording_of_every_client() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == set(CLIENTS)
