"""`/health`, `/ping` and `/version` as seen by a load balancer in each server state."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import pytest

from tests.engine.stepping import SingleSteps
from tests.server.asking import KEYS, RED, get, in_background, long_prompts
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.kserve_asking import HeldOpening, generate


def told(server: InProcessServer) -> tuple[int, int]:
    """The statuses of both paths."""
    health, ping = get(server, "/health"), get(server, "/ping")
    assert health.content == ping.content == b""
    return health.status_code, ping.status_code


def test_it_is_healthy_when_a_model_answers() -> None:
    opening = HeldOpening()
    with in_process_server(open_llm=opening, ready=False) as server:
        assert opening.arrived.wait(PATIENCE)
        assert told(server) == (503, 503)
        opening.go.set()
        wait_until(lambda: told(server) == (200, 200))
        assert generate(server).status_code == 200
        unloading = server.service.models.unload(MODEL)
        asyncio.run_coroutine_threadsafe(unloading, server.loop).result(PATIENCE)
        assert told(server) == (503, 503)


def test_it_is_not_healthy_while_it_drains() -> None:
    with in_process_server() as server, SingleSteps():
        running = in_background(generate, server, long_prompts(1)[0])
        server.wait_until_running(1)
        assert told(server) == (200, 200)
        server.end()
        wait_until(lambda: server.service.state == "draining")
        assert told(server) == (503, 503)
    assert running.result(PATIENCE).status_code == 200


@pytest.mark.parametrize("keys", [{}, KEYS])
def test_health_needs_no_key_but_the_version_does(keys: dict[str, str]) -> None:
    with in_process_server(mock_settings(keys=keys)) as server:
        assert told(server) == (200, 200)
        assert get(server, "/version").status_code == (401 if keys else 200)
        assert get(server, "/version", **RED).json() == {"version": version("glm_multiuser")}
