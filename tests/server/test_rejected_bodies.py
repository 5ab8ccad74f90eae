"""Clients that close their connection get the error for a body that is not read."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.engine.driving import PATIENCE
from tests.server.asking import Wire
from tests.server.in_process import InProcessServer, in_process_server, mock_settings

LARGE = b" " * (5 << 20)
"""More than the buffers of a connection hold."""


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(limits={"body_bytes": 1000})) as server:
        yield server


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_body_that_is_too_large(server: InProcessServer, version: str) -> None:
    address = urlsplit(server.url)
    assert address.hostname is not None
    for _ in range(5):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)
        connection._http_vsn_str = f"HTTP/{version}"  # type: ignore[attr-defined]
        connection.request("POST", "/", LARGE, {"Connection": "close"})
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["code"]) == (413, "body_too_large")
        connection.close()


def test_a_last_chunk_that_is_too_large(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_multiuser.server.middleware.DISCARD_SECONDS", 2 * PATIENCE)
    wire = Wire(server.url)
    lines = ["POST / HTTP/1.1", f"Host: {wire.host}", "Connection: close"]
    lines += ["Transfer-Encoding: chunked", "", "3E9", "[" * 1001, "0", "", ""]
    wire.send("\r\n".join(lines).encode())
    assert wire.read_to_end().startswith(b"HTTP/1.1 413")
    wire.close()


def test_a_client_that_asks_first_is_not_asked_for_its_body(server: InProcessServer) -> None:
    wire = Wire(server.url)
    lines = ["POST / HTTP/1.1", f"Host: {wire.host}", "Connection: close"]
    lines += ["Content-Length: 5000", "Expect: 100-continue", "", ""]
    wire.send("\r\n".join(lines).encode())
    assert wire.read_to_end().startswith(b"HTTP/1.1 413")
    wire.close()


def test_a_body_that_does_not_come_is_not_waited_for(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm_multiuser.server.middleware.DISCARD_SECONDS", 0.05)
    wire = Wire(server.url)
    lines = ["POST / HTTP/1.1", f"Host: {wire.host}", "Connection: close"]
    wire.send("\r\n".join([*lines, "Content-Length: 5000", "", ""]).encode())
    assert wire.read_to_end().startswith(b"HTTP/1.1 413")
    wire.close()
