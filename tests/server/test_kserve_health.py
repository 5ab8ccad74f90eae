"""Liveness and readiness while the server starts, drains and fails; models are mocks."""

from __future__ import annotations

from typing import Any

import pytest

from glm_multiuser.engine.step_loop import FAILED_STEPS_MAX
from glm_multiuser.errors import CheckpointError
from glm_multiuser.server import models as model_host
from tests.engine.mock_runner import Call
from tests.engine.stepping import SingleSteps
from tests.server.asking import answer_alone, get, in_background, long_prompts, post
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    wait_until,
)
from tests.server.kserve_asking import PATH, HeldOpening, generate, states


def ready_body(server: InProcessServer) -> tuple[int, Any]:
    reply = get(server, "/v2/health/ready")
    return reply.status_code, reply.json()


def test_a_server_that_starts_says_how_far_it_is() -> None:
    opening = HeldOpening()
    with in_process_server(open_llm=opening, ready=False) as server:
        assert opening.arrived.wait(PATIENCE)
        loading = {"model": MODEL, "done": 2, "total": 5, "what": "decode, 2 users"}
        body = {"ready": False, "state": "starting", "loading": [loading]}
        assert ready_body(server) == (503, body)
        assert get(server, "/v2/health/live").json() == {"live": True}
        assert get(server, f"{PATH}/ready").status_code == 400
        assert states(server) == {MODEL: "LOADING"}
        assert states(server, ready=True) == {}
        assert generate(server).status_code == 503
        opening.go.set()
        wait_until(lambda: ready_body(server)[0] == 200)
        assert ready_body(server)[1] == {"ready": True, "state": "ready", "loading": []}
        assert get(server, f"{PATH}/ready").json() == {"name": MODEL, "ready": True}


def test_a_server_that_drains_is_not_ready_and_lets_requests_end() -> None:
    prompt = long_prompts(1)[0]
    with in_process_server() as server, SingleSteps():
        running = in_background(generate, server, prompt)
        wait_until(lambda: server.service.running == 1)
        server.end()
        wait_until(lambda: server.service.state == "draining")
        assert ready_body(server) == (503, {"ready": False, "state": "draining", "loading": []})
        assert get(server, f"{PATH}/ready").status_code == 400
        assert get(server, "/v2/health/live").status_code == 200
        refused = generate(server)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
    assert running.result(PATIENCE).json()["response"] == answer_alone(prompt)


class Device:
    """A device that works until it is broken."""

    broken = False

    def __call__(self, call: Call) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")

    def fail(self, server: InProcessServer) -> None:
        """Breaks it, until the engine gives up."""
        self.broken = True
        for _ in range(FAILED_STEPS_MAX):
            assert generate(server).status_code == 500


@pytest.mark.slow
def test_a_model_that_fails_is_started_again() -> None:
    device, opening = Device(), HeldOpening()
    opening.go.set()

    def open_llm(settings: Any, **options: Any) -> Any:
        return opening(settings, before=device, **options)

    with in_process_server(open_llm=open_llm) as server:
        opening.go.clear()
        device.fail(server)
        device.broken = False
        wait_until(lambda: ready_body(server)[1]["state"] == "restarting")
        assert ready_body(server)[0] == 503
        assert get(server, "/v2/health/live").status_code == 200
        assert states(server) == {MODEL: "LOADING"}
        opening.go.set()
        wait_until(lambda: ready_body(server)[0] == 200)
        assert generate(server).json()["response"] == answer_alone("hello")


@pytest.mark.slow
def test_a_model_that_fails_for_good_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "RESTARTS", 1)
    device = Device()

    def open_llm(settings: Any, **options: Any) -> Any:
        if device.broken:
            raise CheckpointError("the checkpoint is gone")
        return mock_llm(settings, before=device, **options)

    with in_process_server(open_llm=open_llm) as server:
        device.fail(server)
        wait_until(lambda: get(server, "/v2/health/live").status_code == 503)
        assert get(server, "/v2/health/live").json() == {"live": False}
        assert ready_body(server) == (503, {"ready": False, "state": "failed", "loading": []})
        (entry,) = post(server, "/v2/repository/index", {}).json()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "the checkpoint is gone")
