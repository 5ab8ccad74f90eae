"""The status for the page's live panel: slots, queue, speed and loading."""

from __future__ import annotations

import threading
from typing import Any

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.server.status import SESSIONS
from glm_multiuser.server.token_rate import WINDOW_SECONDS, TokenRate
from tests.engine.mock_runner import MockRunner
from tests.engine.stepping import SingleSteps
from tests.server.asking import ask, get, in_background, is_idle, long_prompts, post, tokens_alone
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)


def status_of(server: InProcessServer) -> dict[str, Any]:
    status: dict[str, Any] = get(server, "/status").json()
    return status


def test_a_server_at_rest() -> None:
    with in_process_server(mock_settings(users=2, max_queue=7)) as server:
        status = status_of(server)
        tokens = status["totals"].pop("tokens_generated")
        assert tokens == server.llm().stats().tokens_generated > 0  # of the warm-up
        free = {"state": "free", "user": None, "yours": False}
        counts = {"prompt_tokens": 0, "generated_tokens": 0}
        assert {**status, "tokens_per_second": None} == {
            "state": "ready",
            "loading": None,
            "models": [{"name": "mock", "state": "ready", "users": 2, "seq_length": 96}],
            "slots": [{"model": "mock", "slot": slot, **free, **counts} for slot in (0, 1)],
            "queue": {"waiting": 0, "limit": 7},
            "sessions": dict.fromkeys(SESSIONS, 0),
            "cache_bytes": {"reserved": 2 * MockRunner.cache_bytes_per_user, "resident": 0},
            "tokens_per_second": None,
            "totals": {"requests": 0, "compiles_after_ready": 0},
        }


def test_slots_show_what_runs_in_them() -> None:
    prompt = long_prompts(1)[0]
    with in_process_server(mock_settings(users=2)) as server:
        with SingleSteps() as steps:
            asked = [in_background(post, server, "/", {"prompt": prompt}, x_session_id="me")]
            wait_until(lambda: server.service.running == 1)
            steps.step()
            asked.append(in_background(ask, server, prompt))
            wait_until(lambda: server.service.running == 2)
            asked.append(in_background(post, server, "/", {"prompt": "ab"}, x_session_id="me"))
            wait_until(lambda: server.service.running == 3)
            assert status_of(server)["queue"]["waiting"] == 2
            for _ in range(3):
                steps.step()
            status = status_of(server)
        assert [
            (slot["state"], slot["user"], slot["yours"], slot["prompt_tokens"])
            for slot in status["slots"]
        ] == [("decode", "me", True, len(prompt) + 1), ("decode", None, True, len(prompt) + 1)]
        assert [slot["generated_tokens"] for slot in status["slots"]] == [4, 3]
        assert status["queue"] == {"waiting": 1, "limit": 4}
        assert status["totals"]["requests"] == 3
        for one in asked:
            assert one.result(PATIENCE).status_code == 200
        wait_until(lambda: is_idle(server))
        kept = status_of(server)["slots"]
        assert [(slot["state"], slot["user"], slot["yours"]) for slot in kept] == [
            ("idle", "me", True),
            ("free", None, False),
        ]


def test_loading_is_shown_step_by_step() -> None:
    go_on, shown = threading.Event(), threading.Event()

    def slow_llm(settings: ModelSettings, progress: Any, **options: Any) -> MultiUserLLM:
        progress(3, 17, "decode 4 users")
        shown.set()
        assert go_on.wait(PATIENCE)
        return mock_llm(settings, **options)

    with in_process_server(open_llm=slow_llm, ready=False) as server:
        try:
            assert shown.wait(PATIENCE)
            status = status_of(server)
            ready = get(server, "/v2/health/ready")
            live = get(server, "/v2/health/live")
        finally:
            go_on.set()
        loading = {"model": "mock", "done": 3, "total": 17, "what": "decode 4 users"}
        assert status["state"] == "starting"
        assert status["models"][0]["state"] == "loading"
        assert (status["loading"], status["slots"]) == (loading, [])
        assert (ready.status_code, live.status_code) == (503, 200)
        assert ready.json()["loading"] == [loading]
        wait_until(lambda: server.service.ready)
        assert status_of(server)["loading"] is None
        assert get(server, "/v2/health/ready").status_code == 200


def test_models_that_are_not_ready_have_no_slots() -> None:
    with in_process_server(mock_settings(names=("one", "two"))) as server:
        server.service.models.get("one").set_state("failed", "for a reason")
        status = status_of(server)
        assert [model["state"] for model in status["models"]] == ["failed", "ready"]
        assert {slot["model"] for slot in status["slots"]} == {"two"}
        assert status["queue"]["limit"] == 4
        server.service.models.get("one").set_state("ready")


def test_the_speed_is_that_of_the_last_minute() -> None:
    prompt = long_prompts(1)[0]
    with in_process_server() as server:
        rate = server.service.token_rate
        server.call(server.service.tick)
        before = sum(rate.per_second)
        ask(server, prompt)
        server.call(server.service.tick)
        assert sum(rate.per_second) - before == len(tokens_alone(prompt))
        shown = status_of(server)["tokens_per_second"]
        assert shown["now"] == shown["last_minute"][-1]
        assert sum(shown["last_minute"]) == sum(rate.per_second)


def test_a_rate_forgets_after_a_minute_and_survives_a_reload() -> None:
    rate = TokenRate()
    rate.sample({"one": 5})
    rate.sample({"one": 8, "two": 1})
    assert list(rate.per_second) == [5, 4]
    rate.sample({"two": 1})
    rate.sample({"one": 2, "two": 1})  # loaded again, it counts from 0
    assert list(rate.per_second) == [5, 4, 0, 2]
    rate.sample({"one": 1})
    assert rate.per_second[-1] == 0
    for _ in range(2 * WINDOW_SECONDS):
        rate.sample({})
    assert len(rate.per_second) == WINDOW_SECONDS
