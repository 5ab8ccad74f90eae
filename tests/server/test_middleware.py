"""Middleware: authentication, and limits on size, time and origin of a request."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser.server.keys import KeyRing
from glm_multiuser.server.middleware import GuardMiddleware
from glm_multiuser.server.settings import Limits
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    BLUE,
    HTTP,
    KEYS,
    RED,
    Wire,
    answer_alone,
    ask,
    get,
    in_background,
    nothing_stays,
    post,
)
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
)

OPEN = {"/", "/v2/health/live", "/v2/health/ready", "/health", "/ping"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
UNKNOWN = [
    "/nothing",
    "/v1/nothing",
    "/static",
    "/staticfile",
    "/status/",
    "//status",
    "/STATUS",
    "/v2/health/live/",
    "/v2/health/ready/more",
    "/v2/health",
    "/docs",
    "/openapi.json",
]


@pytest.fixture(scope="module")
def locked() -> Iterator[InProcessServer]:
    """A server with keys, for tests that leave it as it was."""
    with in_process_server(mock_settings(keys=KEYS)) as server:
        yield server


@pytest.fixture(scope="module")
def unlocked() -> Iterator[InProcessServer]:
    """A server without keys and with a small limit, for tests that leave it as it was."""
    with in_process_server(mock_settings(limits={"body_bytes": 1000})) as server:
        yield server


def status_of(content: bytes) -> int:
    return int(content.split(b" ", 2)[1])


def routes_of(server: InProcessServer) -> list[str]:
    """Every path that the server describes, with the name and version of its model."""
    described = get(server, "/openapi.json", **RED).json()["paths"]
    named = [path.replace("{version}", "1") for path in described]
    return [re.sub(r"\{[^}]*\}", MODEL, path) for path in named]


@pytest.mark.slow
def test_every_route_needs_a_key(locked: InProcessServer) -> None:
    routes = routes_of(locked)
    assert {"/", "/status", "/metrics", "/llm/generate"} <= set(routes)
    for path, method in itertools.product([*routes, *UNKNOWN], METHODS):
        response = HTTP.request(method, locked.url + path, content=b"{}")
        is_open = path in OPEN and method in ("GET", "HEAD")
        assert (response.status_code == 401) is not is_open, (method, path)
        if not is_open:
            assert response.headers["www-authenticate"] == "Bearer"
        if not is_open and method != "HEAD":
            error = response.json()["error"]
            message = error["message"] if path.startswith("/v1/") else error
            assert message.startswith("an API key is needed")


@pytest.mark.slow
def test_with_a_key_every_route_is_there(locked: InProcessServer) -> None:
    """Or the test above would find its 401s for another reason."""
    for path in routes_of(locked):
        response = get(locked, path, **RED)
        expected = 404 if path.startswith("/v1/responses/") else 200
        assert response.status_code in (expected, 400, 405), path
        if response.status_code == 404:
            assert response.json()["error"]["code"] == "response_not_found"
    for path in UNKNOWN[:2]:
        assert get(locked, path, **RED).status_code == 404


def test_head_is_get_without_a_body(locked: InProcessServer) -> None:
    for path in (*routes_of(locked), *UNKNOWN):
        whole, head = (
            HTTP.request(method, locked.url + path, headers=RED) for method in ("GET", "HEAD")
        )
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        for name in ("content-type", "allow"):
            assert head.headers.get(name) == whole.headers.get(name), path
    assert "HEAD" in HTTP.post(f"{locked.url}/status", headers=RED).headers["allow"]
    health = Wire(locked.url)
    health.send(b"HEAD /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2)
    assert health.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    health.close()


@pytest.mark.parametrize(
    "path",
    [
        "/static/../status",
        "/static/..%2fstatus",
        "/static/%2e%2e/status",
        "/static/%2e%2e/%2e%2e/keys.py",
        "/static//etc/passwd",
        "/static/....//keys.py",
        "/v2/health/live/../../../status",
        "/%2fstatus",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_door(locked: InProcessServer, path: str) -> None:
    wire = Wire(locked.url)
    wire.send(f"GET {path} HTTP/1.1\r\nHost: {wire.host}\r\nConnection: close\r\n\r\n".encode())
    answer = wire.read_to_end()
    assert status_of(answer) in (401, 404)
    assert b'"state"' not in answer
    assert b"import" not in answer
    wire.close()


def test_the_page_and_its_files_need_no_key_but_are_read_only(locked: InProcessServer) -> None:
    files = re.findall(r'(?:src|href)="/?(static/[^"]+)"', get(locked, "/").text)
    assert files
    for file in ["", "static/index.html", *files]:
        answer = get(locked, f"/{file}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        assert HTTP.post(f"{locked.url}/{file}").status_code == 401


def test_only_what_is_spoken_here_gets_past(locked: InProcessServer) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it got past")

    guard = GuardMiddleware(app, KeyRing({}), Limits(), ())
    asyncio.run(guard({"type": "websocket", "path": "/"}, None, None))  # type: ignore[arg-type]
    wire = Wire(locked.url)
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    wire.send(f"GET /status HTTP/1.1\r\nHost: {wire.host}\r\n{upgrade}\r\n".encode())
    assert status_of(wire.read_until(b"\r\n\r\n")) == 401
    wire.close()


@pytest.mark.parametrize(
    ("path", "code_of"),
    [("/", lambda body: body["code"]), ("/v1/models", lambda body: body["error"]["code"])],
)
@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("Bearer wrong-key-0123456789", "invalid_api_key"),
        ("Bearer " + KEYS["red"][:-1], "invalid_api_key"),
        ("Basic " + KEYS["red"], "missing_api_key"),
        (KEYS["red"], "missing_api_key"),
    ],
)
def test_a_wrong_key_is_told_as_each_protocol_does(
    locked: InProcessServer, path: str, code_of: Any, header: str, code: str
) -> None:
    response = post(locked, path, {"prompt": "ab"}, authorization=header)
    assert response.status_code == 401
    assert code_of(response.json()) == code
    assert header not in response.text


def test_a_key_opens(locked: InProcessServer) -> None:
    for key in (RED, BLUE):
        answer = post(locked, "/", {"prompt": "ab"}, **key).json()
        assert answer["response"] == answer_alone("ab")


def test_without_a_key_not_even_the_body_is_waited_for(locked: InProcessServer) -> None:
    wire = Wire(locked.url)
    wire.send(f"POST / HTTP/1.1\r\nHost: {wire.host}\r\nContent-Length: 9\r\n\r\n".encode())
    assert status_of(wire.read_until(b"\r\n\r\n")) == 401
    wire.close()


def test_who_runs_is_shown_to_its_own_key_only() -> None:
    with in_process_server(mock_settings(keys=KEYS, users=3)) as server, nothing_stays(server):
        with SingleSteps() as steps:
            headers = [{**RED, "x_session_id": "secret plan"}, {**BLUE, "x_session_id": "b"}, RED]
            asked = []
            for number, header in enumerate(headers):
                asked.append(in_background(post, server, "/", {"prompt": "ab"}, **header))
                server.wait_until_running(number + 1)
            for _ in range(6):
                steps.step()
            seen_by_red, seen_by_blue = (
                [
                    (slot["user"], slot["yours"])
                    for slot in get(server, "/status", **key).json()["slots"]
                ]
                for key in (RED, BLUE)
            )
            text = get(server, "/status", **BLUE).text + get(server, "/metrics", **BLUE).text
        assert seen_by_red == [("secret plan", True), (None, False), (None, True)]
        assert seen_by_blue == [(None, False), ("b", True), (None, False)]
        assert "secret" not in text
        assert {one.result(PATIENCE).status_code for one in asked} == {200}


def send_head(wire: Wire, *lines: str) -> None:
    wire.send("\r\n".join(["POST / HTTP/1.1", f"Host: {wire.host}", *lines, "", ""]).encode())


def test_a_body_that_is_announced_too_large_is_not_waited_for(unlocked: InProcessServer) -> None:
    wire = Wire(unlocked.url)
    send_head(wire, "Content-Length: 1001")
    answer = wire.read_until(b"}")
    assert status_of(answer) == 413
    assert b"body: 1001 bytes are announced; it may have 1000" in answer
    wire.close()


def test_a_body_that_grows_too_large_is_cut_before_its_end(unlocked: InProcessServer) -> None:
    wire = Wire(unlocked.url)
    send_head(wire, "Transfer-Encoding: chunked")
    for _ in range(3):
        wire.send(b"190\r\n" + b"[" * 400 + b"\r\n")
    answer = wire.read_until(b"}")
    assert status_of(answer) == 413
    assert b"more than 1000 bytes arrived" in answer
    wire.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_have_as_many_bytes_as_it_may(unlocked: InProcessServer, chunked: bool) -> None:
    for size, status in ((1000, 200), (1001, 413)):
        content = json.dumps({"prompt": "ab"}).ljust(size).encode()
        parts = (content[start : start + 100] for start in range(0, size, 100))
        response = HTTP.post(unlocked.url, content=parts if chunked else content)
        assert response.status_code == status


@pytest.mark.parametrize("head", ["Content-Length: 10", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("beginning", [b"", b"1\r\n{\r\n"])
def test_a_body_that_never_ends(head: str, beginning: bytes) -> None:
    settings = mock_settings(limits={"body_seconds": 0.05})
    with in_process_server(settings) as server, nothing_stays(server):
        wire = Wire(server.url)
        send_head(wire, head)
        wire.send(beginning)
        answer = wire.read_to_end()  # the connection cannot be used any more, and is closed
        assert status_of(answer) == 408
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "body_timeout"
        assert b"the body had not arrived after 0.05 seconds" in answer
        wire.close()


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: -1"],
        ["Content-Length: +5"],
        ["Content-Length: five"],
        ["Content-Length: 1e3"],
        ["Content-Length: 0x10"],
        ["Content-Length: 5 5"],
        ["Content-Length: 5, 6"],
        ["Content-Length: 99999999999999999999999999999999"],
        ["Content-Length: 18446744073709551615"],
        ["Content-Length: 5", "Content-Length: 6"],
        ["Content-Length: \u00b2"],
        ["Content-Length: 5", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked, identity"],
    ],
)
def test_a_length_that_is_none(unlocked: InProcessServer, lines: list[str]) -> None:
    wire = Wire(unlocked.url)
    send_head(wire, *lines)
    assert status_of(wire.read_until(b"\r\n\r\n")) in (400, 413)
    wire.close()
    assert ask(unlocked, "ab").json()["response"] == answer_alone("ab")


def test_a_client_that_asks_first_whether_it_may_send(unlocked: InProcessServer) -> None:
    wire = Wire(unlocked.url)
    content = b'{"prompt": "ab"}'
    send_head(wire, f"Content-Length: {len(content)}", "Expect: 100-continue")
    wire.read_until(b"HTTP/1.1 100 Continue\r\n\r\n")
    wire.send(content)
    assert answer_alone("ab")[:20].encode() in wire.read_until(b'"finish_reason"')
    wire.close()
    refused = Wire(unlocked.url)
    send_head(refused, "Content-Length: 5000", "Expect: 100-continue")
    assert status_of(refused.read_until(b"\r\n\r\n")) == 413
    refused.close()


FOREIGN = [
    "http://elsewhere.example",
    "https://elsewhere.example:8000",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    "null",
    "http://[",
    "",
    "file://",
    "nonsense",
]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", ["/", "/llm/generate", "/v1/chat/completions", "/nothing"])
def test_a_page_of_another_origin_may_not_ask(
    unlocked: InProcessServer, path: str, origin: str
) -> None:
    response = post(unlocked, path, {"prompt": "ab"}, origin=origin)
    assert response.status_code == 403
    assert f"pages of {origin!r} may not send requests to this server" in response.text
    assert not any(name.startswith("access-control") for name in response.headers)


def test_our_own_page_may_ask(unlocked: InProcessServer) -> None:
    response = post(unlocked, "/", {"prompt": "ab"}, origin=unlocked.url)
    assert response.json()["response"] == answer_alone("ab")


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("https://localhost", "localhost:443", 200),
        ("https://localhost:443", "localhost", 200),
        ("http://localhost", "localhost:80", 200),
        ("http://[::1]", "[::1]:80", 200),
        ("https://localhost", "localhost:80", 403),
        ("http://localhost", "localhost:443", 403),
        ("https://localhost", "localhost:4430", 403),
        ("https://elsewhere.example", "localhost:443", 403),
    ],
)
def test_the_default_port_may_be_left_out(
    unlocked: InProcessServer, origin: str, host: str, status: int
) -> None:
    """A proxy may write it into `Host`; browsers never do."""
    response = post(unlocked, "/", {"prompt": "ab"}, origin=origin, host=host)
    assert response.status_code == status


def test_without_configuration_no_other_origin_may_read(unlocked: InProcessServer) -> None:
    asks_first = {"origin": FOREIGN[0], "access-control-request-method": "POST"}
    for method, headers in (("GET", {"origin": FOREIGN[0]}), ("OPTIONS", asks_first)):
        response = HTTP.request(method, f"{unlocked.url}/status", headers=headers)
        assert not any(name.startswith("access-control") for name in response.headers)


def test_an_asterisk_allows_requests_from_every_origin() -> None:
    with in_process_server(mock_settings(cors_origins=("*",))) as server:
        headers = {"origin": "https://any.example"}
        answer = HTTP.post(server.url, json={"prompt": "ab"}, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_another_origin_that_was_let_in() -> None:
    friend = "https://friend.example"
    with in_process_server(mock_settings(keys=KEYS, cors_origins=(friend,))) as server:
        # A browser asks first, and has no key to show then.
        asks_first = {
            "origin": friend,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-session-id",
        }
        preflight = HTTP.options(server.url, headers=asks_first)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == friend
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for sent, allowed in (
            ("X-Stainless-Lang,x-stainless-retry-count", True),
            ("x-request-id", True),
            ("authorization, content-type, user-agent, x-stainless-os", True),
            ("x-stainless-os, x-forwarded-for", False),
            ("x-forwarded-for", False),
        ):
            asked = {**asks_first, "access-control-request-headers": sent}
            preflight = HTTP.options(server.url, headers=asked)
            assert (preflight.status_code == 200) is allowed
            listed = preflight.headers["access-control-allow-headers"].lower().split(", ")
            assert set(sent.lower().replace(" ", "").split(",")).issubset(listed) is allowed
        answered = post(server, "/", {"prompt": "ab"}, origin=friend, **RED)
        refused = post(server, "/", {"prompt": "ab"}, origin=friend)
        assert (answered.status_code, refused.status_code) == (200, 401)
        for response in (answered, refused):
            assert response.headers["access-control-allow-origin"] == friend
            assert "access-control-allow-credentials" not in response.headers
            shown = response.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", "x-should-retry"} <= set(shown)
        for origin in FOREIGN[:3]:
            foreign = post(server, "/", {"prompt": "ab"}, origin=origin, **RED)
            assert foreign.status_code == 403
            assert "access-control-allow-origin" not in foreign.headers
            preflight = HTTP.options(server.url, headers={**asks_first, "origin": origin})
            assert "access-control-allow-origin" not in preflight.headers
