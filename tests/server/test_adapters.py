"""Behaviour that `/v1/messages` and `/v1/responses` share with chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.server.errors import APIError
from tests.engine.stepping import SingleSteps
from tests.server.anthropic_reading import MESSAGES
from tests.server.asking import (
    HTTP,
    Wire,
    answer_alone,
    events_of,
    in_background,
    is_idle,
    long_prompts,
    nothing_stays,
    post,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_settings,
    wait_until,
)

RESPONSES = "/v1/responses"
PATHS = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
LAST = {MESSAGES: "message_stop", RESPONSES: "response.completed"}


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=2, max_queue=2)) as server:
        yield server


def body_of(path: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """Without limits of its own, and with a session that no other has."""
    if path == RESPONSES:
        return {"input": prompt, **fields}
    return {"max_tokens": 64, "messages": [{"role": "user", "content": prompt}], **fields}


def text_of(path: str, response: httpx.Response, stream: bool) -> str:
    assert response.status_code == 200, response.text
    if stream:
        *events, last = events_of(response.text)
        assert last["type"] in (LAST[path], "response.incomplete")
        if path == RESPONSES:
            kind = "response.output_text.delta"
            return "".join(one["delta"] for one in events if one["type"] == kind)
        return "".join(one["delta"].get("text", "") for one in events if "delta" in one)
    if path == RESPONSES:
        (item,) = response.json()["output"]
        return str(item["content"][0]["text"])
    return "".join(block["text"] for block in response.json()["content"])


def error_of(path: str, body: Any) -> Any:
    """The error object in this protocol's form."""
    assert set(body) == ({"type", "error"} if path == MESSAGES else {"error"})
    error = body["error"]
    assert set(error) == (
        {"type", "message", "code"} if path == MESSAGES else {"type", "message", "code", "param"}
    )
    return error


@PATHS
def test_a_full_queue_is_rejected_and_the_others_end(path: str, server: InProcessServer) -> None:
    prompts = long_prompts(5)
    with nothing_stays(server):
        with SingleSteps() as steps:
            running = []
            for number, prompt in enumerate(prompts[:4]):
                body = body_of(path, prompt, stream=bool(number % 2))
                running.append(in_background(post, server, path, body))
                server.wait_until_running(number + 1)
                if number == 1:
                    steps.step()
            for stream in (False, True):
                rejected = post(server, path, body_of(path, prompts[4], stream=stream))
                assert rejected.status_code == 429
                assert int(rejected.headers["retry-after"]) >= 1
                error = error_of(path, rejected.json())
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        texts = [
            text_of(path, one.result(PATIENCE), bool(number % 2))
            for number, one in enumerate(running)
        ]
        assert texts == [answer_alone(prompt) for prompt in prompts[:4]]


@PATHS
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slot(
    path: str, stream: bool, server: InProcessServer
) -> None:
    with nothing_stays(server), SingleSteps() as steps:
        body = body_of(path, long_prompts(1)[0], stream=stream)
        wire = Wire(server.url).request(path, body)
        server.wait_until_running(1)
        for _ in range(3):
            steps.step()
        if stream:
            wire.read_until(b".delta" if path == RESPONSES else b"text_delta")
        wire.close()
        wait_until(lambda: is_idle(server))


@PATHS
def test_an_error_in_a_stream_is_its_last_event(path: str, server: InProcessServer) -> None:
    with SingleSteps() as steps:
        wire = Wire(server.url).request(
            path, body_of(path, long_prompts(1)[0], stream=True), connection="close"
        )
        server.wait_until_running(1)
        for _ in range(3):
            steps.step()
        wire.read_until(b".delta" if path == RESPONSES else b"text_delta")
        error = APIError(503, "shutting_down", "the server ends")
        server.call(lambda: server.service.abort_all(error))
    content = wire.read_to_end().decode()
    wire.close()
    last = events_of(content)[-1]
    if path == MESSAGES:
        assert "event: error\n" in content
        assert error_of(path, last) == {
            "type": "overloaded_error",
            "message": "the server ends",
            "code": "shutting_down",
        }
    else:
        assert "event: response.failed\n" in content
        assert last["response"]["status"] == "failed"
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
        assert last["response"]["error"] == {"code": "server_error", "message": "the server ends"}
        assert last["sequence_number"] == len(events_of(content)) - 1


@PATHS
def test_a_session_and_a_deadline(path: str, server: InProcessServer) -> None:
    body = body_of(path, "ab")
    with SingleSteps():
        asked = in_background(post, server, path, body, x_session_id="mine")
        server.wait_until_running(1)
        users = server.call(lambda: list(server.service.admission._by_user))
        late = in_background(post, server, path, body, x_request_timeout="600")
        server.wait_until_running(2)

        def expire() -> None:
            (*_, (generation, _)) = server.service._running.values()
            generation._expire(600)

        server.call(expire)
    assert users == ["anonymous/mine"]
    assert text_of(path, asked.result(PATIENCE), False) == answer_alone("ab")
    response = late.result(PATIENCE)
    kind = "timeout_error" if path == MESSAGES else "server_error"
    assert response.status_code == 504
    assert error_of(path, response.json())["type"] == kind
    response = post(server, path, body, x_request_timeout="soon")
    assert response.status_code == 400
    assert "x-request-timeout" in error_of(path, response.json())["message"]


@PATHS
def test_a_server_that_is_not_ready(path: str) -> None:
    with in_process_server(mock_settings(), ready=True) as server:
        server.call(lambda: setattr(server.service, "state", "draining"))
        response = post(server, path, body_of(path, "ab"))
        server.call(lambda: setattr(server.service, "state", "ready"))
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    kind = "overloaded_error" if path == MESSAGES else "server_error"
    error = error_of(path, response.json())
    assert (error["type"], error["code"]) == (kind, "draining")


def test_pages_of_another_origin_may_send_the_headers() -> None:
    friend = "https://friend.example"
    names = "x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access,x-stainless-os"
    with in_process_server(mock_settings(cors_origins=(friend,))) as server:
        for path, method in ((MESSAGES, "POST"), (f"{RESPONSES}/x", "DELETE")):
            headers = {
                "origin": friend,
                "access-control-request-method": method,
                "access-control-request-headers": names,
            }
            preflight = HTTP.options(server.url + path, headers=headers)
            assert preflight.status_code == 200, preflight.text
            allowed = preflight.headers["access-control-allow-headers"].lower()
            assert set(names.split(",")) <= {name.strip() for name in allowed.split(",")}
        answer = HTTP.post(server.url + MESSAGES, json={}, headers={"origin": friend})
        assert "request-id" in answer.headers["access-control-expose-headers"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXT = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "x"]), "text": JSON})
CALLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["tool_use", "tool_result", "function_call", "function_call_output"])},
    optional={
        name: JSON | st.just("f")
        for name in (
            "id",
            "name",
            "input",
            "arguments",
            "call_id",
            "tool_use_id",
            "output",
            "content",
        )
    },
)
CONTENT = JSON | st.lists(TEXT | CALLS | JSON, max_size=3)
ITEM = CALLS | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON, "content": CONTENT}
)
TOOL = st.fixed_dictionaries(
    {},
    optional={
        name: JSON | st.just({"type": "object"}) | st.sampled_from(["f", "function"])
        for name in ("type", "name", "description", "input_schema", "parameters", "strict")
    },
)
CHOICE = st.sampled_from(
    ["auto", "none", "required", {"type": "any"}, {"type": "tool", "name": "f"}]
)
FIELDS = {
    "messages": {"messages": st.lists(ITEM, max_size=4) | JSON, "max_tokens": st.just(2) | JSON},
    "responses": {"input": st.lists(ITEM, max_size=4) | st.text(max_size=3) | JSON},
}
OPTIONAL = {
    "model": st.just("mock") | JSON,
    "tools": st.lists(TOOL, max_size=2) | JSON,
    "tool_choice": CHOICE | JSON,
    "stream": st.booleans() | JSON,
    "temperature": st.floats(0, 2) | JSON,
    "stop_sequences": JSON,
    "stop": JSON,
    "metadata": JSON | st.just({"user_id": "u"}),
    "system": CONTENT,
    "instructions": JSON,
    "text": JSON | st.just({"format": {"type": "json_object"}}),
    "output_config": JSON | st.just({"format": {"type": "json_schema", "schema": {}}}),
    "reasoning": JSON,
    "thinking": JSON,
    "include": JSON,
    "previous_response_id": JSON,
    "store": st.booleans(),
    "seed": JSON,
    "user": JSON,
}
BODIES = {
    name: st.fixed_dictionaries(required, optional=OPTIONAL) | JSON
    for name, required in FIELDS.items()
}


@pytest.mark.slow
@PATHS
def test_every_body_is_answered_or_rejected_in_the_right_form(
    path: str, server: InProcessServer
) -> None:
    """Never a 500."""
    url, bodies = server.url + path, BODIES[path.rpartition("/")[2]]
    with httpx.Client(timeout=PATIENCE, trust_env=False) as client:

        @settings(max_examples=150, deadline=None)
        @given(bodies)
        def check(body: Any) -> None:
            # Python writes NaN and halves of characters, too.
            response = client.post(url, content=json.dumps(body).encode())
            if response.status_code != 200:
                assert response.status_code in (400, 404), response.text
                assert error_of(path, response.json())["type"] in (
                    "invalid_request_error",
                    "not_found_error",
                )

        check()
