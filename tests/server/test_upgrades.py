"""Requests that offer HTTP/2 (h2c), as Java's HttpClient and curl send them, keep their bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.asking import Wire
from tests.server.echoing import echo_llm, message
from tests.server.in_process import InProcessServer, in_process_server, mock_settings

BODY = json.dumps({"messages": [{"role": "user", "content": message("hello")}]}).encode()
SIMPLE = json.dumps({"prompt": message("simple")}).encode()

# Recorded: Java 17.0.15 sends the body in a packet of its own.
JAVA = (
    b"POST /v1/chat/completions HTTP/1.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\n"
    b"Host: 127.0.0.1:18377\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
    b"Upgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\n"
    b"Content-Type: application/json\r\n\r\n"
)
# Recorded: curl 7.88.1 with --http2.
CURL = (
    b"POST /v1/chat/completions HTTP/1.1\r\n"
    b"Host: 127.0.0.1:18377\r\n"
    b"User-Agent: curl/7.88.1\r\n"
    b"Accept: */*\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"Upgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    b"Content-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=2), echo_llm) as server:
        yield server


@pytest.fixture
def wire(server: InProcessServer) -> Iterator[Wire]:
    wire = Wire(server.url)
    yield wire
    wire.close()


def read_response(wire: Wire) -> tuple[int, dict[str, str], bytes]:
    """Takes the next response off a connection that stays open."""
    wire.read_until(b"\r\n\r\n")
    head, _, rest = wire.received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers["content-length"])
    while len(rest) < length:
        rest += wire.read()
    wire.received = rest[length:]
    return int(status.split()[1]), headers, rest[:length]


def answer(wire: Wire) -> str:
    status, headers, body = read_response(wire)
    assert (status, headers.get("upgrade")) == (200, None), body
    said: dict[str, Any] = json.loads(body)
    content: str = (
        said["response"] if "response" in said else (said["choices"][0]["message"]["content"])
    )
    return content


@pytest.mark.parametrize("head", [JAVA, CURL], ids=["java", "curl"])
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
def test_the_body_arrives_in_packets_of_any_size(wire: Wire, head: bytes, size: int) -> None:
    for _ in range(2):  # on one connection
        sent = head % len(BODY) + BODY
        for start in range(0, len(sent), size):
            wire.send(sent[start : start + size])
        assert answer(wire) == "hello"


def test_head_and_body_apart(wire: Wire) -> None:
    wire.send(JAVA % len(BODY))
    wire.send(BODY)
    assert answer(wire) == "hello"


def test_a_chunked_body(wire: Wire) -> None:
    head = JAVA.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
    chunks = [BODY[:9], BODY[9:30], BODY[30:], b""]
    sent = head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    wire.send(sent[:-40])
    wire.send(sent[-40:])
    assert answer(wire) == "hello"


def test_it_waits_for_the_whole_body(wire: Wire) -> None:
    """And asks for it, where the client waits, too."""
    wire.send(CURL.replace(b"Accept", b"Expect: 100-continue\r\nAccept") % len(BODY))
    assert wire.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.received = b""
    wire.send(BODY)
    assert answer(wire) == "hello"


def test_several_requests_in_one_packet(wire: Wire) -> None:
    plain = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SIMPLE)
    offered = CURL % len(BODY) + BODY
    get = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h3\r\n\r\n"
    wire.send(offered + plain + SIMPLE + get + offered + plain + SIMPLE)
    assert [answer(wire), answer(wire)] == ["hello", "simple"]
    status, _, body = read_response(wire)
    assert (status, json.loads(body)["name"]) == (200, "glm_multiuser")
    assert [answer(wire), answer(wire)] == ["hello", "simple"]


def test_many_offers_in_one_packet(wire: Wire) -> None:
    """As many as fit; each is parsed once more, none within another."""
    get = b"GET /v2 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    count = 30
    wire.send(get * count)
    assert [read_response(wire)[0] for _ in range(count)] == [200] * count


def test_the_end_of_a_connection_is_kept(wire: Wire) -> None:
    head = CURL.replace(b"Connection: ", b"Connection: close, ")
    wire.send(head % len(BODY) + BODY)
    assert wire.read_to_end().count(b"HTTP/1.1 200") == 1


def test_what_is_no_http_is_refused_behind_an_offer(wire: Wire) -> None:
    wire.send(CURL % len(BODY) + BODY)
    assert answer(wire) == "hello"
    wire.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert b"HTTP/1.1 400" in wire.read_to_end()


def test_a_tunnel_is_refused(wire: Wire) -> None:
    wire.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert wire.read_to_end().startswith(b"HTTP/1.1 400")
