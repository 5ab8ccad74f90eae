"""Attacks with measured limits: clients without a key against a server with keys."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from glm_multiuser.server import middleware, request_log, wrong_keys
from glm_multiuser.server.http_protocol import HEAD_BYTES, HEADER_FIELDS, URL_BYTES
from glm_multiuser.server.logs import TextFormatter
from glm_multiuser.server.wrong_keys import WrongKeys
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
    wait_until,
)
from tests.server.process import ServerProcess

MEBIBYTE = 1 << 20
ATTACK_BYTES = 100 * MEBIBYTE
MEMORY_BYTES = 50 * MEBIBYTE
"""By which the server may grow."""
WORK_SECONDS = 1.0
"""The most that the server may work on between another client's request and its answer: how long
the client waits on the clock depends on what else the machine does."""
ATTACKERS = 4
ROUNDS = 3
HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


# Headers, before the key is checked.


@pytest.fixture(scope="module")
def attacked() -> Iterator[ServerProcess]:
    """A process of its own, whose memory is the server's alone."""
    command = (sys.executable, "-m", "tests.server.idle_server")
    keys = ",".join(f"{name} {key}" for name, key in KEYS.items())
    environment = {"GLM_MULTIUSER_API_KEYS": keys}
    with ServerProcess(command=command, environment=environment) as process:
        assert get(process, "/status", **RED).status_code == 200
        yield process


ATTACKS = {
    "endless headers": (HEAD, b"X-Header: " + b"x" * 1000 + b"\r\n", {431}),
    "endless tiny headers": (HEAD, b"a:\r\n", {431}),
    "a giant header": (HEAD + b"X-Header: ", b"x", {431}),
    "a giant name of a header": (HEAD, b"x", {431}),
    "a giant URL": (b"GET /", b"x", {414}),
    "a giant URL of another protocol": (b"POST /v1/", b"%20", {414}),
    "endless empty lines": (b"", b"\r\n", {431}),
    "endless trailers": (CHUNKED + b"0\r\n", b"X-Trailer: " + b"x" * 1000 + b"\r\n", {401, 431}),
    "a giant trailer": (CHUNKED + b"0\r\nX-Trailer: ", b"x", {401, 431}),
    "a giant chunk extension": (CHUNKED + b"1;x=", b"x", {401, 431}),
    "endless requests": (b"", HEAD + b"\r\n", {200, None}),
}
"""How each begins, what follows for ever, and the status of the answer. Where the head is complete,
the first answer may be on its way before the rest arrives."""


def status_of(content: bytes) -> int:
    return int(content.split(b" ", 2)[1])


def attack(server: ServerProcess, beginning: bytes, repeated: bytes) -> Optional[int]:
    """Sends 100 MB or until the server has enough; the status of its answer, if there is one."""
    wire = Wire(server.url)
    block = repeated * (MEBIBYTE // len(repeated))
    try:
        wire.send(beginning)
        for _ in range(ATTACK_BYTES // len(block)):
            wire.send(block)
    except OSError:
        pass  # closed by the server
    else:
        raise AssertionError("the server took everything")
    wire.read_to_end()
    wire.close()
    return status_of(wire.received) if wire.received else None


def memory_of(pid: int) -> int:
    """Bytes of a process that are in memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) << 10


def work_of(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("beginning", "repeated", "allowed"), ATTACKS.values(), ids=ATTACKS)
def test_endless_headers_cost_neither_memory_nor_time(
    attacked: ServerProcess, beginning: bytes, repeated: bytes, allowed: set[Optional[int]]
) -> None:
    before = memory_of(attacked.pid)
    statuses: list[Optional[int]] = []

    def repeat() -> None:
        statuses.extend(attack(attacked, beginning, repeated) for _ in range(ROUNDS))

    running = [in_background(repeat) for _ in range(ATTACKERS)]
    most, work = before, []
    while not all(one.done() for one in running):
        since = work_of(attacked.pid)
        assert get(attacked, "/status", **RED).status_code == 200
        work.append(work_of(attacked.pid) - since)
        most = max(most, memory_of(attacked.pid))
    for one in running:
        one.result(PATIENCE)
    assert len(statuses) == ATTACKERS * ROUNDS
    assert set(statuses) <= allowed
    assert most - before < MEMORY_BYTES
    assert max(work) < WORK_SECONDS


def test_heads_that_never_end_are_held_in_little_memory(attacked: ServerProcess) -> None:
    before = memory_of(attacked.pid)
    wires = [Wire(attacked.url) for _ in range(200)]
    for wire in wires:
        wire.send(HEAD + b"a:\r\n" * (HEADER_FIELDS - 2))
        wire.send(b"X-Header: " + b"x" * (HEAD_BYTES - 2000))
    assert get(attacked, "/status", **RED).status_code == 200
    assert memory_of(attacked.pid) - before < MEMORY_BYTES
    for wire in wires:
        assert wire.received == b""
        wire.close()


@pytest.fixture(scope="module")
def locked() -> Iterator[InProcessServer]:
    """With keys, for tests that leave it as it was."""
    settings = mock_settings(keys=KEYS, allowed_hosts=("glm.example.org",))
    with in_process_server(settings) as server:
        yield server


def head_of(size: int) -> bytes:
    """A head with so many bytes in all."""
    head = HEAD + b"Connection: close\r\nX-Header: %b\r\n\r\n"
    return head % (b"x" * (size - len(head) + 2))


@pytest.mark.parametrize("piece", [1000, 10**6])
def test_a_head_may_have_as_many_bytes_as_it_may(locked: InProcessServer, piece: int) -> None:
    for size, status in ((HEAD_BYTES - 1, 200), (HEAD_BYTES + 1, 431)):
        head = head_of(size)
        assert len(head) == size
        wire = Wire(locked.url)
        for start in range(0, size, piece):
            wire.send(head[start : start + piece])
        assert status_of(wire.read_to_end()) == status
        wire.close()


def test_a_url_may_have_as_many_bytes_as_it_may(locked: InProcessServer) -> None:
    for size, status in ((URL_BYTES, 200), (URL_BYTES + 1, 414)):
        path = "/?".ljust(size, "x")
        assert get(locked, path).status_code == status


def test_there_may_be_as_many_headers_as_there_may(locked: InProcessServer) -> None:
    for count, status in ((HEADER_FIELDS - 2, 200), (HEADER_FIELDS - 1, 431)):
        wire = Wire(locked.url)
        wire.send(HEAD + b"Connection: close\r\n" + b"a: b\r\n" * count + b"\r\n")
        assert status_of(wire.read_to_end()) == status
        wire.close()


@pytest.mark.parametrize(
    ("path", "code_of"),
    [("/", lambda body: body["code"]), ("/v1/models", lambda body: body["error"]["code"])],
)
@pytest.mark.parametrize("code", ["headers_too_large", "url_too_long", "invalid_http"])
def test_each_protocol_is_told_in_its_own_way(
    locked: InProcessServer, path: str, code_of: Any, code: str
) -> None:
    more = {"url_too_long": "?" + "x" * URL_BYTES}.get(code, "")
    line = {"headers_too_large": "X: " + "x" * HEAD_BYTES, "invalid_http": "\x00"}.get(code, "")
    wire = Wire(locked.url)
    wire.send(f"GET {path}{more} HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n".encode())
    head, _, body = wire.read_to_end().partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert code_of(json.loads(body)) == code
    wire.close()


def test_limits_count_for_each_request_of_a_connection(locked: InProcessServer) -> None:
    with nothing_stays(locked):
        wire = Wire(locked.url)
        content = json.dumps({"prompt": "ab"}).ljust(3 * HEAD_BYTES).encode()
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        key = f"Authorization: {RED['authorization']}\r\nX: {'x' * 30_000}\r\n\r\n"
        for _ in range(5):
            wire.received = b""
            wire.send((head + key).encode() + content)
            assert status_of(wire.read_until(b'"finish_reason"')) == 200
        wire.received = b""
        wire.send(head_of(HEAD_BYTES + 1))
        assert status_of(wire.read_to_end()) == 431
        wire.close()


def test_a_trailer_is_no_header(locked: InProcessServer) -> None:
    """Or it would reach the application after the headers have been checked."""
    trailer = f"Authorization: {RED['authorization']}\r\nX-Session-Id: other\r\n"
    with nothing_stays(locked):
        wire = Wire(locked.url)
        wire.send(CHUNKED + b"0\r\n" + trailer.encode() + b"\r\n")
        assert status_of(wire.read_until(b"\r\n\r\n")) == 401
        wire.close()


# Names of other hosts.


PATHS = ["/", "/static/favicon.svg", "/status", "/v1/models", "/v2/health/live", "/nothing"]


def ask_host(server: InProcessServer, *hosts: str, path: str = "/", version: str = "1.1") -> int:
    wire = Wire(server.url)
    lines = [f"GET {path} HTTP/{version}", *(f"Host: {host}" for host in hosts)]
    lines += [f"Authorization: {RED['authorization']}", "Connection: close", "", ""]
    wire.send("\r\n".join(lines).encode())
    answer = wire.read_to_end()
    wire.close()
    return status_of(answer)


@pytest.mark.parametrize("path", PATHS)
def test_a_page_whose_name_was_rebound_reaches_nothing(locked: InProcessServer, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS", "DELETE"):
        headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000", **RED}
        response = HTTP.request(method, locked.url + path, headers=headers, content=b"{}")
        assert response.status_code == 421, (method, path)
        if method != "HEAD":
            assert "--allowed-host evil.example" in response.text


def test_a_rebound_page_may_neither_chat_nor_load_nor_unload(locked: InProcessServer) -> None:
    evil = {"host": "evil.example", "origin": "http://evil.example", **RED}
    for path in ("/", "/v1/chat/completions", f"/v2/repository/models/{MODEL}/unload"):
        assert post(locked, path, {"prompt": "ab"}, **evil).status_code == 421
    assert ask_host(locked, "localhost", path="/v2/health/ready") == 200


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "192.0.2.7:1",
        "[::1]",
        "[2001:db8::1]:8000",
        "localhost",
        "LocalHost.:80",
        socket.gethostname(),
        socket.getfqdn() + ":8000",
        "glm.example.org",
        "GLM.Example.org:443",
    ],
)
def test_own_names_and_addresses_are_answered(locked: InProcessServer, host: str) -> None:
    assert [ask_host(locked, host, path=path) for path in PATHS] == [200] * 5 + [404]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.1",
        "0x7f000001",
        "example.org",
        "more.glm.example.org",
    ],
)
def test_other_names_are_not(locked: InProcessServer, host: str) -> None:
    assert ask_host(locked, host) == ask_host(locked, f"{host}:8000") == 421


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        ("",),
        ("localhost", "localhost"),
        ("localhost", "evil.example"),
        ("localhost evil.example",),
        ("localhost, evil.example",),
        ("user@localhost",),
        ("localhost/evil.example",),
        ("localhost:8000:8000",),
        ("localhost:port",),
        ("[::1",),
        ("::1",),
        ("[evil.example]",),
    ],
)
def test_a_host_that_is_none(locked: InProcessServer, hosts: tuple[str, ...]) -> None:
    for path in PATHS:
        assert ask_host(locked, *hosts, path=path) == 400


def test_only_http_1_0_may_leave_it_out(locked: InProcessServer) -> None:
    assert ask_host(locked, version="1.0") == 200
    assert ask_host(locked, "evil.example", version="1.0") == 421


# Lines of the log.


def test_no_client_writes_lines_of_its_own_on_the_terminal(locked: InProcessServer) -> None:
    shown, logger = io.StringIO(), logging.getLogger(request_log.__name__)
    handler, level = logging.StreamHandler(shown), logger.level
    handler.setFormatter(TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fake = "%0a00:00:00%20info%20%20%20%20model%20ready%0d%1b[2J%1b]0;x%07%c2%9b%e2%80%ae"
        get(locked, f"/x{fake}%20status=200", **RED)
        wait_until(lambda: re.search(r"path='/x.*\n", shown.getvalue()))
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    lines = shown.getvalue().splitlines()  # one of an earlier test may be among them
    assert all(each.isprintable() and " client=127.0.0.1 " in each for each in lines)
    (line,) = (each for each in lines if "path='/x" in each)
    assert re.search(r" client=127.0.0.1 key=red method=GET path='/x\\n00:00:00 info ", line)
    assert re.search(r"\\x1b.* status=200' status=404 seconds=", line)


def test_an_error_with_lines_in_it_is_indented() -> None:
    try:
        raise ValueError("first\n00:00:00 info    ready\x1b[2J")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "bad\nthing", (), sys.exc_info())
    first, *others = TextFormatter().format(record).split("\n")
    assert first.endswith(r"bad\nthing")
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert others[-1] == r"    00:00:00 info    ready\x1b[2J"


def test_the_log_names_client_and_key(
    locked: InProcessServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = "/no-other-test-asks-for-this"

    def lines() -> list[dict[str, Any]]:
        fields = [record.__dict__["fields"] for record in caplog.records if record.msg == "request"]
        return [one for one in fields if one["path"] == path]

    for headers in (RED, BLUE, {}):
        get(locked, path, **headers)
    wait_until(lambda: len(lines()) == 3)
    assert [one["client"] for one in lines()] == ["127.0.0.1"] * 3
    assert {one["key"] for one in lines()} == {"red", "blue", None}
    assert not any(key in caplog.text for key in KEYS.values())


# Wrong keys.


WRONG = {"authorization": "Bearer wrong-key-0123456789"}


def test_each_wrong_key_of_an_address_waits_longer() -> None:
    sent = WrongKeys()
    delays = [sent.record("192.0.2.1") for _ in range(100)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-1] == max(delays) == wrong_keys.LONGEST_SECONDS
    assert sent.record("192.0.2.2") == 0.1
    assert [sent.record(f"2001:db8::{one}") for one in range(3)] == [0.1, 0.2, 0.4]
    assert sent.record("2001:db8:0:1::1") == 0.1
    assert [sent.record("::ffff:192.0.2.3"), sent.record("192.0.2.3")] == [0.1, 0.2]
    assert sent.record("::1") == sent.record("::ffff:192.0.2.4") == 0.1
    assert [sent.record("no address" * 100) for _ in range(2)] == [0.1, 0.2]


def test_wrong_keys_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = WrongKeys()
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert [sent.record("192.0.2.1") for _ in range(3)] == [0.1, 0.2, 0.4]
    now[0] += wrong_keys.FORGET_SECONDS + 1
    assert sent.record("192.0.2.1") == 0.1


def test_as_many_addresses_as_there_are_take_bounded_memory() -> None:
    sent = WrongKeys()
    for number in range(2 * wrong_keys.ADDRESSES):
        sent.record(f"10.0.{number // 256}.{number % 256}")
    assert len(sent._sent) == wrong_keys.ADDRESSES
    assert sent.record("10.0.0.0") == 0.1
    assert sent.record(f"10.0.{2 * wrong_keys.ADDRESSES // 256 - 1}.255") == 0.2


def test_only_wrong_keys_wait(locked: InProcessServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    async def sleep(seconds: float) -> None:
        assert seconds > 0
        asked.set()
        while not go_on.is_set():
            await real_sleep(0.01)

    real_sleep = asyncio.sleep
    # A module of its own: the server's other tasks sleep as before.
    replaced = SimpleNamespace(**{**vars(asyncio), "sleep": sleep})
    monkeypatch.setattr(middleware, "asyncio", replaced)
    wrong = in_background(get, locked, "/status", **WRONG)
    try:
        assert asked.wait(PATIENCE)
        assert get(locked, "/status", **RED).status_code == 200
        assert get(locked, "/status").status_code == 401
        assert ask_with(locked, BLUE) == answer_alone("ab")
        assert not wrong.done()
    finally:
        go_on.set()
    assert wrong.result(PATIENCE).json()["code"] == "invalid_api_key"


def ask_with(server: InProcessServer, headers: dict[str, str]) -> Any:
    return post(server, "/", {"prompt": "ab"}, **headers).json()["response"]


# Booleans as numbers.


@pytest.fixture(scope="module")
def unlocked() -> Iterator[InProcessServer]:
    """Without keys, for tests that leave it as it was."""
    with in_process_server() as server:
        yield server


CHAT = {"messages": [{"role": "user", "content": "ab"}]}
INPUT = {"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["ab"]}
INFER = f"/v2/models/{MODEL}/infer"
SAMPLING = ("temperature", "top_p", "seed")
NUMBERS: list[tuple[str, dict[str, Any], str]] = [
    *(("/", {"prompt": "ab"}, field) for field in (*SAMPLING, "max_tokens", "max_length")),
    *(
        ("/llm/generate", {"cache_id": "a", "query": "ab"}, field)
        for field in ("temperature", "top_p", "max_length")
    ),
    *(
        (path, body, field)
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "ab"}))
        for field in (
            *(*SAMPLING, "max_tokens", "n", "top_k", "repetition_penalty", "min_tokens"),
            *("frequency_penalty", "presence_penalty"),
        )
    ),
    ("/v1/chat/completions", {**CHAT, "logprobs": True}, "top_logprobs"),
    ("/v1/chat/completions", CHAT, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "ab"}, "logprobs"),
    ("/v1/completions", {"prompt": "ab"}, "best_of"),
    *(
        (f"/v2/models/{MODEL}/generate", {"prompt": "ab"}, field)
        for field in (
            *(*SAMPLING, "max_tokens", "max_token", "top_k", "repetition_penalty"),
            *("timeout", "sequence_id", "history_len"),
        )
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), NUMBERS)
def test_true_is_no_number(
    unlocked: InProcessServer, path: str, body: dict[str, Any], field: str
) -> None:
    for value in (True, False):
        response = post(unlocked, path, {**body, field: value})
        assert response.status_code == 400, response.text
        assert field in response.text
    assert unlocked.service.running == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": {"temperature": True}},
        {"parameters": {"max_tokens": True}},
        {"inputs": [{**INPUT, "shape": [True, True]}]},
        {"inputs": [{**INPUT, "parameters": {"binary_data_size": False}}]},
        {"inputs": [INPUT, {**INPUT, "name": "max_token", "datatype": "INT16", "data": [True]}]},
    ],
)
def test_true_is_no_number_among_tensors(
    unlocked: InProcessServer, changed: dict[str, Any]
) -> None:
    assert post(unlocked, INFER, {"inputs": [INPUT]}).status_code == 200
    assert post(unlocked, INFER, {"inputs": [INPUT], **changed}).status_code == 400


def test_true_is_no_number_of_users(unlocked: InProcessServer) -> None:
    config = json.dumps({"parameters": {"users": True}})
    body = {"parameters": {"config": config}}
    response = post(unlocked, f"/v2/repository/models/{MODEL}/load", body)
    assert response.status_code == 400
    assert "users" in response.text
    assert ask(unlocked, "ab").json()["response"] == answer_alone("ab")
