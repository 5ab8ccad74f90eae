"""Triton's generate extension: one question as plain JSON, whole or as an event stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.asking import MAX_TOKEN, QUESTIONS, Target, ask, send


def question(text: str, history: str = "[]") -> dict[str, Any]:
    return {"prompt": text, "history": history, "temperature": "0", "max_token": MAX_TOKEN}


def events_of(body: bytes) -> list[Any]:
    """The JSON of every event; whatever is no data is left out."""
    lines = body.replace(b"\r\n", b"\n").split(b"\n")
    return [json.loads(line[len(b"data: ") :]) for line in lines if line.startswith(b"data: ")]


@pytest.mark.parametrize("version", [(), ("versions", "1")], ids=["latest", "version"])
@pytest.mark.parametrize("text", [*QUESTIONS[:3], "a\u2028b\n\u0085c 🙂"])
def test_generate(target: Target, text: str, version: tuple[str, ...]) -> None:
    reply = send(target, target.path(*version, "generate"), question(text, '[["a","b"]]'))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("application/json")
    body = reply.json()
    (alone,) = ask(target, [text], ['[["a","b"]]'])
    assert body["model_name"] == target.model
    assert body["model_version"] == "1"
    assert body["response"] == alone.response
    assert json.loads(body["history"]) == alone.history


@pytest.mark.parametrize("version", [(), ("versions", "1")], ids=["latest", "version"])
@pytest.mark.parametrize("text", [*QUESTIONS[:3], "a\u2028b\n\u0085c 🙂"])
def test_generate_stream(target: Target, text: str, version: tuple[str, ...]) -> None:
    reply = send(target, target.path(*version, "generate_stream"), question(text))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.body)
    (alone,) = ask(target, [text])
    assert "".join(one["response"] for one in events) == alone.response
    assert json.loads(events[-1]["history"]) == alone.history
    for one in events:
        assert one["model_name"] == target.model
        assert one["model_version"] == "1"


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_sampling_parameter_inside_parameters(target: Target, path: str) -> None:
    body = question("hello")
    body["parameters"] = {"temperature": body.pop("temperature")}
    reply = send(target, target.path(path), body)
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"prompt": {}}', b'{"parameters": 5}'])
def test_a_body_that_is_no_question(target: Target, path: str, body: bytes) -> None:
    reply = send(target, target.path(path), body)
    assert reply.error()
    assert reply.headers["content-type"].startswith("application/json")
