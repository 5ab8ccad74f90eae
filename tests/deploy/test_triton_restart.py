"""`serve` of Triton: what happens when the server dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.deploy import triton_run
from glm_multiuser.deploy.triton_server import Ports
from glm_multiuser.errors import ConfigError, EngineClosedError

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
    starts[:] = [None, EngineClosedError("died"), ConfigError("no"), ConnectionError("no"), None]
    triton_run.serve({}, "127.0.0.1", PORTS)
    assert starts == []


class DeadServer:
    def __init__(self) -> None:
        self.stopped = 0

    def exit_code(self) -> int:
        return -signal.SIGABRT

    def stop(self) -> None:
        self.stopped += 1


class Client:
    """Of a server that does not respond."""

    def __init__(self, host: str, port: int) -> None:
        pass

    def is_live(self) -> bool:
        return False


def test_a_server_that_dies_before_it_is_ready_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = DeadServer()
    monkeypatch.setattr(triton_run, "TritonServer", lambda *arguments: server)
    monkeypatch.setattr(triton_run, "TritonClient", Client)
    with pytest.raises(EngineClosedError, match="ended by itself with code -6"):
        triton_run._serve_once(tmp_path, tmp_path, "127.0.0.1", PORTS, threading.Event())
    assert server.stopped == 1
