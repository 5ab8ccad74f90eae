"""The server with glm-tiny that tests of the page ask, and what it tells without the page."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.process import ServerProcess

LONG_QUESTION = "What happens to my request, step by step?"
OTHER_QUESTION = "为什么每个用户要有自己的缓存？"
SHORT_QUESTION = "What is your name?"
SECOND = "Conversation 2"
FEW = 12
"""Steps that make some text, and not yet an answer."""

PYTHON = '\n```python\n@cache\ndef f(x: int) -> str:  # why\n    return "a" * 3\n```'


def ask_without_page(server: ServerProcess, question: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return dict(response.json())


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def status(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/status", timeout=60).json())


def states(server: ServerProcess) -> list[str]:
    return [slot["state"] for slot in status(server)["slots"]]


def asked(server: ServerProcess) -> int:
    """How many questions have not got their answer yet."""
    found = status(server)
    busy = [slot for slot in found["slots"] if slot["state"] in ("prefill", "decode")]
    return len(busy) + int(found["queue"]["waiting"])


def cancelled(server: ServerProcess) -> list[Any]:
    """The requests whose clients went away."""
    return [one for one in server.events("generation ended") if one["outcome"] == "cancelled"]
