"""A request past its deadline ends with its own error and frees its resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    answer_alone,
    ask,
    errors_of,
    events_of,
    in_background,
    long_prompts,
    nothing_stays,
    post,
    step,
)
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)

pytestmark = pytest.mark.slow

SHORT = "0.01"
MESSAGE = "the request took more than 0.01 seconds"


@pytest.fixture(scope="module")
def shared() -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    with in_process_server() as server:
        yield server


def wait_until_expired(server: InProcessServer) -> None:
    """Until every request that runs is past its deadline; the engine may stand still."""
    wait_until(lambda: None not in errors_of(server))


def start_expired(server: InProcessServer, body: dict[str, Any], **headers: str) -> Any:
    before = server.service.requests
    asked = in_background(post, server, "/", body, **headers)
    wait_until(lambda: server.service.requests == before + 1)
    wait_until_expired(server)
    return asked


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_frees_the_slot(stream: bool, steps_before: int) -> None:
    (prompt,) = long_prompts(1)
    body = {"prompt": prompt, "stream": stream}
    with in_process_server() as server, nothing_stays(server):
        with SingleSteps() as steps:
            asked = in_background(post, server, "/", body, x_request_timeout=SHORT)
            wait_until(lambda: server.service.requests == 1)
            for _ in range(steps_before):
                steps.step()
            wait_until_expired(server)
            steps.step()
            steps.step()
            stats = server.llm().stats()
            assert (stats.active_users, stats.waiting) == (0, 0)
            response = asked.result(PATIENCE)
        error = events_of(response.text)[-1] if stream else response.json()
        assert response.status_code == (200 if stream else 504)
        assert error == {
            "error": MESSAGE,
            "code": "deadline_exceeded",
            **({"status": 504} if stream else {}),
        }
        assert "retry-after" not in response.headers
        labels = {"model": MODEL, "outcome": "deadline_exceeded"}
        assert server.service.metrics.registry.get_sample_value("glm_requests_total", labels) == 1


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_official_clients_do_not_send_it_again(protocol: str) -> None:
    settings = mock_settings(limits={"request_seconds": float(SHORT)})
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 9}
    options: Any = {"api_key": "none", "max_retries": 2, "timeout": PATIENCE}
    with in_process_server(settings) as server:
        of_openai = openai.OpenAI(base_url=f"{server.url}/v1", **options)
        of_anthropic = anthropic.Anthropic(base_url=server.url, **options)
        is_openai = protocol == "openai"
        create: Any = of_openai.chat.completions if is_openai else of_anthropic.messages
        with of_openai, of_anthropic:
            with SingleSteps():
                asked = in_background(create.create, **body)
                wait_until(lambda: server.service.requests == 1)
                wait_until_expired(server)
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
                asked.result(PATIENCE)
        assert server.service.requests == 1


def test_a_deadline_counts_while_a_request_is_queued_and_is_nobody_elses() -> None:
    first, second = long_prompts(2)
    with in_process_server(mock_settings(users=1)) as server, nothing_stays(server):
        with SingleSteps() as steps:
            running = in_background(ask, server, first)
            wait_until(lambda: server.service.running == 1)
            steps.step()
            queued = in_background(post, server, "/", {"prompt": second}, x_request_timeout=SHORT)
            wait_until(lambda: server.service.running == 2)
            wait_until(lambda: errors_of(server).count(None) == 1)
            steps.step()
            assert server.llm().stats().waiting == 0
            assert queued.result(PATIENCE).status_code == 504
        assert running.result(PATIENCE).json()["response"] == answer_alone(first)


@pytest.mark.parametrize("header", [{}, {"x_request_timeout": "1000"}])
def test_nobody_gets_more_time_than_the_server_gives(header: dict[str, str]) -> None:
    settings = mock_settings(limits={"request_seconds": float(SHORT)})
    with in_process_server(settings) as server, nothing_stays(server), SingleSteps() as steps:
        asked = start_expired(server, {"prompt": "ab"}, **header)
        steps.step()
        assert asked.result(PATIENCE).json()["error"] == MESSAGE


def test_a_deadline_that_is_far_away_changes_nothing() -> None:
    with in_process_server() as server, nothing_stays(server):
        response = post(server, "/", {"prompt": "ab"}, x_request_timeout="1e3")
        assert response.json()["response"] == answer_alone("ab")


def test_a_deadline_is_forgotten_when_its_request_has_ended() -> None:
    def deadlines() -> int:
        timers = server.loop._scheduled  # type: ignore[attr-defined]
        names = [getattr(one._callback, "__name__", "") for one in timers if not one.cancelled()]
        return names.count("_expire")

    with in_process_server() as server:
        with SingleSteps():
            asked = in_background(ask, server, "ab")
            wait_until(lambda: server.service.running == 1)
            assert server.call(deadlines) == 1
        asked.result(PATIENCE)
        assert server.call(deadlines) == 0


def test_the_step_api_tells_it_to_the_next_call_and_forgets_the_generation() -> None:
    with in_process_server() as server, nothing_stays(server):
        with SingleSteps() as steps:
            body = {"cache_id": "an id", "query": long_prompts(1)[0]}
            asked = in_background(post, server, "/llm/generate", body, x_request_timeout=SHORT)
            wait_until(lambda: server.service.requests == 1)
            wait_until_expired(server)
            steps.step()
            response = asked.result(PATIENCE)
            assert (response.status_code, response.json()["error"]) == (504, MESSAGE)
            steps.step()
            assert server.llm().stats().active_users == 0
        assert step(server, "an id").status_code == 409


@pytest.mark.parametrize("value", ["", "0", "-1", "-0.0", "nan", "inf", "1e999", "soon", "1 s"])
@pytest.mark.parametrize("path", ["/", "/llm/generate", "/v1/chat/completions"])
def test_a_deadline_that_is_none(shared: InProcessServer, path: str, value: str) -> None:
    bodies = {
        "/": {"prompt": "ab"},
        "/llm/generate": {"cache_id": "an id", "query": "ab"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "model": MODEL},
    }
    before = shared.service.requests
    response = post(shared, path, bodies[path], x_request_timeout=value)
    assert response.status_code == 400
    told = f"x-request-timeout is {value!r}; it must be a number of seconds above 0"
    assert told in response.text
    assert shared.service.requests == before
