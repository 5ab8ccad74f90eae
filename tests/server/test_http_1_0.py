"""Responses to HTTP/1.0, which has no chunks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.asking import Wire, answer_alone, streamed_text
from tests.server.in_process import InProcessServer, in_process_server, mock_settings

CLOSE = "close" if sys.version_info >= (3, 10) else None
"""HTTP/1.0 implies it, and Python 3.9's uvicorn does not say it."""


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=2)) as server:
        yield server


def exchange(
    server: InProcessServer, path: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.0", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    wire = Wire(server.url)
    wire.send("\r\n".join([*lines, "", ""]).encode() + content)
    head, _, rest = wire.read_to_end().partition(b"\r\n\r\n")
    wire.close()
    status, *fields = head.decode().lower().split("\r\n")
    return int(status.split()[1]), dict(one.split(": ", 1) for one in fields), rest


@pytest.mark.parametrize("headers", [{}, {"Connection": "keep-alive"}])
def test_a_stream_ends_with_its_connection(
    server: InProcessServer, headers: dict[str, str]
) -> None:
    status, fields, body = exchange(server, "/", {"prompt": "ab", "stream": True}, **headers)
    assert (status, fields.get("connection")) == (200, CLOSE)
    assert not fields.keys() & {"transfer-encoding", "content-length"}
    assert streamed_text(body.decode()) == answer_alone("ab")


def test_other_responses_have_a_length(server: InProcessServer) -> None:
    for path, body, method in (
        ("/", {"prompt": "ab"}, "POST"),
        ("/status", None, "GET"),
        ("/static/favicon.svg", None, "GET"),
        ("/none", None, "GET"),
    ):
        _, fields, content = exchange(server, path, body, method)
        assert int(fields["content-length"]) == len(content)
        assert "transfer-encoding" not in fields
    status, fields, content = exchange(server, "/status", None, "HEAD")
    assert (status, content, fields.get("connection")) == (200, b"", CLOSE)
    assert exchange(server, "http://[", None, "GET")[0] == 400
    assert exchange(server, "/status", None, "GET", Upgrade="h2c", Connection="Upgrade")[0] == 200


def test_it_is_not_asked_to_continue(server: InProcessServer) -> None:
    status, _, _ = exchange(server, "/", {"prompt": "ab"}, Expect="100-continue")
    assert status == 200


def test_streams_of_http_1_1_have_chunks(server: InProcessServer) -> None:
    wire = Wire(server.url).request("/", {"prompt": "ab", "stream": True})
    assert wire.read_until(b"0\r\n\r\n").lower().count(b"transfer-encoding: chunked") == 1
    wire.close()
