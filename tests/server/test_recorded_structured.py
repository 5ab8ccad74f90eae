"""Recorded structured-output requests of real clients get the requested structure.

`tests/clients` runs these clients; `python -m tests.clients.record` rewrites the recordings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.clients.running import MODEL, STRUCTURED
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import OPTIONS
from tests.structured.random_model import brief_llm

RECORDED = Path(__file__).parent / "recorded_structured"


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=2, names=(MODEL,)), brief_llm) as made:
        yield made


def asked_for(body: dict[str, Any]) -> dict[str, Any]:
    """The schema that a body has."""
    if body.get("tool_choice") not in (None, "none", "auto"):
        (tool,) = body["tools"]
        schema: dict[str, Any] = tool["function"]["parameters"]
        return schema
    wanted = body["response_format"]
    return wanted["json_schema"]["schema"] if "json_schema" in wanted else {"type": "object"}


@pytest.mark.parametrize("client", STRUCTURED)
def test_every_request_gets_what_it_asks_for(server: InProcessServer, client: str) -> None:
    recorded = json.loads((RECORDED / f"{client}.json").read_text("utf-8"))
    assert len(recorded["requests"]) == len(STRUCTURED[client])
    for request in recorded["requests"]:
        response = httpx.request(
            request["method"], server.url + request["path"], json=request["body"], **OPTIONS
        )
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        text = calls[0]["function"]["arguments"] if calls else message["content"]
        jsonschema.validate(json.loads(text), asked_for(request["body"]))
