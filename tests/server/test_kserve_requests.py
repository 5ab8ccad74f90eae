"""KServe v2 requests: sessions, deadlines, admission and failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    answer_alone,
    events_of,
    in_background,
    is_idle,
    llm_that_fails,
    long_prompts,
    post,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.kserve_asking import PATH, column, infer, refusal


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """One with room for every test here."""
    with in_process_server(mock_settings(users=4, max_queue=64)) as server:
        yield server


@pytest.mark.parametrize(
    ("parameters", "headers", "user"),
    [
        ({"sequence_id": 42}, {}, "anonymous/42"),
        ({"sequence_id": "tom"}, {}, "anonymous/tom"),
        ({"sequence_id": 0}, {}, None),
        ({}, {}, None),
        ({"sequence_id": 42}, {"x_session_id": "header"}, "anonymous/header"),
    ],
)
@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_the_sequence_is_the_session(
    server: InProcessServer, path: str, parameters: Any, headers: Any, user: Any
) -> None:
    prompt = long_prompts(1)[0]
    body = {"inputs": [column("prompt", prompt)], "prompt": prompt, "parameters": parameters}
    with SingleSteps() as steps:
        reply = in_background(post, server, f"{PATH}/{path}", body, **headers)
        wait_until(lambda: server.service.running == 1)
        steps.step()
        (slot,) = [slot for slot in server.llm().slots() if slot.request is not None]
        # A request without a user is a user of its own.
        assert (slot.user if user else isinstance(slot.user, str)) == (user or False)
    assert reply.result(PATIENCE).status_code == 200


def test_a_session_that_cannot_be(server: InProcessServer) -> None:
    body = {"inputs": [column("prompt", "q")], "parameters": {"sequence_id": "x" * 257}}
    status, error = refusal(server, body)
    assert status == 400
    assert "257 characters" in error


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize(
    ("timeout", "header"),
    [(1, None), (0, "0.000001"), (1, "100"), (10**12, "0.000001"), (None, "0.000001")],
)
def test_the_earlier_deadline_counts(
    server: InProcessServer, path: str, timeout: Any, header: Any
) -> None:
    parameters = {} if timeout is None else {"timeout": timeout}
    headers = {} if header is None else {"x_request_timeout": header}
    body = {"inputs": [column("prompt", "q")], "prompt": "q", "parameters": parameters}
    with SingleSteps():
        reply = in_background(post, server, f"{PATH}/{path}", body, **headers)
        wait_until(lambda: server.service.running == 1)
        server.call(lambda: None)  # what was due on the event loop has run before this
        server.call(lambda: None)
    answer = reply.result(PATIENCE)
    error = events_of(answer.text)[-1] if path == "generate_stream" else answer.json()
    assert answer.status_code == (200 if path == "generate_stream" else 504)
    assert error["code"] == "deadline_exceeded"


def test_a_timeout_of_0_is_none(server: InProcessServer) -> None:
    outputs = infer(server, column("prompt", "hello"), parameters={"timeout": 0})
    assert outputs["response"] == [answer_alone("hello")]


def test_a_batch_enters_as_a_whole_or_not_at_all() -> None:
    settings = mock_settings(users=1, max_queue=2)
    with in_process_server(settings) as server:
        with SingleSteps() as steps:
            running = in_background(post, server, f"{PATH}/generate", {"prompt": "q"})
            wait_until(lambda: server.service.running == 1)
            steps.step()
            body = {"inputs": [column("prompt", "a", "b", "c")]}
            answer = post(server, f"{PATH}/infer", body)
            assert answer.status_code == 429
            assert "Retry-After" in answer.headers
            assert answer.json()["code"] == "queue_full"
            assert server.service.running == 1
        assert running.result(PATIENCE).status_code == 200
        assert infer(server, column("prompt", "a", "b"))["response"] == [
            answer_alone("a"),
            answer_alone("b"),
        ]


def test_one_wrong_row_refuses_the_batch(server: InProcessServer) -> None:
    for body in (
        {"inputs": [column("prompt", "a", "b"), column("temperature", "0", "warm")]},
        {"inputs": [column("prompt", "a", "b" * 200)]},
    ):
        assert refusal(server, body)[0] == 400
        assert is_idle(server)


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_a_request_that_fails_is_500_and_harms_nobody(path: str) -> None:
    with in_process_server(open_llm=llm_that_fails) as server:
        body = {"inputs": [column("prompt", "ok", f"a{FAILS}")], "prompt": f"a{FAILS}"}
        status, error = refusal(server, body, path)
        assert status == 500
        assert "finite" in error
        wait_until(lambda: is_idle(server))
        assert infer(server, column("prompt", "ok"))["response"] == [answer_alone("ok")]


def test_an_error_in_a_stream_is_its_last_event() -> None:
    with in_process_server(open_llm=llm_that_fails) as server:
        answer = post(server, f"{PATH}/generate_stream", {"prompt": f"a{FAILS}"})
    assert answer.status_code == 200
    *pieces, last = events_of(answer.text)
    assert all(set(piece) == {"model_name", "model_version", "response"} for piece in pieces)
    assert set(last) == {"error", "code"}
    assert last["code"] == "generation_failed"
