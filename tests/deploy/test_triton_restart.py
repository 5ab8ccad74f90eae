"""`serve` of Triton: what happens when the server dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

from glm_multiuser.deploy import triton_run
from glm_multiuser.deploy.triton_server import Ports
from glm_multiuser.errors import ConfigError, EngineClosedError
from glm_multiuser.server.logs import FIELDS
from tests.conformance.asking import PATIENCE

PORTS = Ports(1, 2, 3)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What each start of the server does: an error, or None for one that dies after it was ready;
    after the last one a signal ends the command."""
    outcomes: list[Any] = []

    def serve_once(*arguments: Any) -> None:
        outcome = outcomes.pop(0)
        if not outcomes:
            arguments[-1].set()
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(triton_run, "_serve_once", serve_once)
    monkeypatch.setattr(triton_run, "write_repository", lambda folder, parameters: None)
    monkeypatch.setattr(triton_run, "make_backends", lambda folder: None)
    monkeypatch.setattr(triton_run, "RETRY_SECONDS", 0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield outcomes
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("error", [ConfigError("no"), EngineClosedError("no")])
def test_a_first_start_that_fails_ends_the_command(starts: list[Any], error: Exception) -> None:
    starts[:] = [error, None]
    with pytest.raises(type(error)):
        triton_run.serve({}, "127.0.0.1", PORTS)
    assert starts == [None]


def test_a_later_one_is_tried_again(starts: list[Any]) -> None:
    starts[:] = [None, EngineClosedError("died"), ConfigError("no"), OSError("no"), None]
    triton_run.serve({}, "127.0.0.1", PORTS)
    assert starts == []


class Server:
    """A server that runs until it is stopped, or killed."""

    def __init__(self) -> None:
        self.code: Optional[int] = None
        self.stopped = threading.Event()

    def exit_code(self) -> Optional[int]:
        return self.code

    def stub(self, model: str) -> int:
        return 1

    def stop(self) -> None:
        self.stopped.set()


class Client:
    """Of a server that responds, and whose models load immediately."""

    def __init__(self) -> None:
        self.live = True

    def is_live(self) -> bool:
        return self.live

    def load(self, model: str) -> None:
        pass

    def state(self, model: str) -> str:
        return "LOADING"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()
    monkeypatch.setattr(triton_run, "TritonServer", lambda *arguments: server)
    monkeypatch.setattr(triton_run, "TritonClient", lambda *arguments: client)
    monkeypatch.setattr(triton_run, "RESPONSE_SECONDS", 0.1)
    monkeypatch.setattr(triton_run, "POLL_SECONDS", 0.01)
    return client


def serve_once(folder: Path) -> None:
    triton_run._serve_once(folder, folder, "127.0.0.1", PORTS, threading.Event())


def test_a_server_that_dies_before_it_is_ready_is_an_error(
    server: Server, client: Client, tmp_path: Path
) -> None:
    client.live = False
    server.code = -signal.SIGABRT
    with pytest.raises(EngineClosedError, match="ended by itself with code -6"):
        serve_once(tmp_path)
    assert server.stopped.is_set()


def test_a_server_that_does_not_respond_before_it_is_ready_is_an_error(
    server: Server, client: Client, tmp_path: Path
) -> None:
    client.live = False
    with pytest.raises(EngineClosedError, match=r"did not respond for 0\.1 seconds"):
        serve_once(tmp_path)
    assert server.stopped.is_set()


def test_a_server_that_dies_while_it_loads_is_stopped_before_its_loads_end(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stub that survives it keeps the connections of the loads open."""

    stopped = []

    def load(model: str) -> None:
        server.code = -signal.SIGABRT
        stopped.append(server.stopped.wait(PATIENCE))
        raise ConnectionResetError

    monkeypatch.setattr(client, "load", load)
    with pytest.raises(EngineClosedError, match="ended by itself with code -6"):
        serve_once(tmp_path)
    assert stopped == [True, True]


def test_a_load_whose_connection_is_closed_is_an_error_of_ours(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process of a dying server may outlive its connections."""

    def load(model: str) -> None:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(client, "load", load)
    with pytest.raises(EngineClosedError, match="lost while it loaded: reset by peer"):
        serve_once(tmp_path)
    assert server.stopped.is_set()


@pytest.mark.parametrize(
    ("code", "why"),
    [(-signal.SIGABRT, "ended by itself with code -6"), (None, "did not respond")],
)
def test_a_server_that_is_lost_after_it_was_ready_is_stopped(
    server: Server,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: Optional[int],
    why: str,
) -> None:
    def state(model: str) -> str:
        server.code = code
        client.live = False
        return "LOADING"

    monkeypatch.setattr(client, "state", state)  # a supervisor asks for it once it is ready
    monkeypatch.setattr(server, "stub", lambda model: None)
    serve_once(tmp_path)
    (lost,) = (one for one in caplog.records if one.message == "tritonserver lost")
    fields = getattr(lost, FIELDS)
    assert fields["code"] == code
    assert why in fields["why"]
    assert server.stopped.is_set()
