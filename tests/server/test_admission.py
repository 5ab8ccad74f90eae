"""Which requests are admitted, how others are rejected, and that no accepted one is lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.admission import Admission
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import Limits, ModelSettings
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    BLUE,
    FAILS,
    HTTP,
    KEYS,
    RED,
    Wire,
    answer_alone,
    ask,
    events_of,
    get,
    in_background,
    is_idle,
    llm_that_fails,
    long_prompts,
    nothing_stays,
    post,
    step,
    step_to_end,
    streamed_text,
)
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)


def assert_refused(response: httpx.Response, status: int, code: str) -> None:
    """The error of every protocol but OpenAI's, with Retry-After."""
    assert response.status_code == status
    assert response.json()["code"] == code
    assert isinstance(response.json()["error"], str)
    assert int(response.headers["retry-after"]) >= 1


def fill(server: InProcessServer, *prompts: str) -> list[Future[httpx.Response]]:
    """Asks them one behind the other; returns when all have entered."""
    asked = []
    for prompt in prompts:
        entered = server.service.running
        asked.append(in_background(ask, server, prompt))
        server.wait_until_running(entered + 1)
    return asked


def test_a_full_queue_is_rejected_immediately_and_does_not_affect_others() -> None:
    prompts = long_prompts(5)
    settings = mock_settings(users=2, max_queue=2)
    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps() as steps:
            streaming = Wire(server.url).request("/", {"prompt": prompts[0], "stream": True})
            wait_until(lambda: server.service.running == 1)
            (running,) = fill(server, prompts[1])
            steps.step()
            steps.step()
            streaming.read_until(b'"delta"')
            waiting = fill(server, prompts[2], prompts[3])
            # The engine is held, so a response that waited for it would never come.
            refused = [
                ask(server, prompts[4]),
                ask(server, prompts[4], stream=True),
                step(server, "an id", prompts[4]),
            ]
        for response in refused:
            assert_refused(response, 429, "queue_full")
            assert "max_queue is 2" in response.json()["error"]
        for prompt, one in zip(prompts[1:4], [running, *waiting]):
            assert one.result(PATIENCE).json()["response"] == answer_alone(prompt)
        streaming.read_until(b'"finish_reason"')
        assert answer_alone(prompts[0]) == streamed_text(streaming.received.decode())
        streaming.close()


def test_who_was_refused_by_a_full_queue_enters_when_there_is_room() -> None:
    with in_process_server(mock_settings(users=1, max_queue=1)) as server:
        with SingleSteps():
            asked = fill(server, *long_prompts(2))
            assert_refused(step(server, "my id", "ab"), 429, "queue_full")
            assert_refused(ask(server, "ab"), 429, "queue_full")
        for one in asked:
            assert one.result(PATIENCE).status_code == 200
        assert ask(server, "ab").json()["response"] == answer_alone("ab")
        # A refusal uses up no name of the step API.
        assert step_to_end(server, "my id", "ab") == answer_alone("ab")


def test_a_server_that_is_starting_says_so_and_when_to_come_again() -> None:
    opening, go_on = threading.Event(), threading.Event()

    def slow_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        opening.set()
        assert go_on.wait(PATIENCE)
        return mock_llm(settings, **options)

    with in_process_server(open_llm=slow_llm, ready=False) as server:
        try:
            assert opening.wait(PATIENCE)
            for response in (ask(server, "ab"), ask(server, "ab", stream=True), step(server, "i")):
                assert_refused(response, 503, "model_not_ready")
        finally:
            go_on.set()
        wait_until(lambda: server.service.ready)
        assert ask(server, "ab").status_code == 200


def test_graceful_shutdown_rejects_new_requests_and_ends_no_running_one() -> None:
    prompts = long_prompts(2)
    with in_process_server(mock_settings(users=1)) as server:
        with SingleSteps() as steps:
            asked = fill(server, *prompts)
            steps.step()
            server.end()
            wait_until(lambda: server.service.state == "draining")
            for response in (ask(server, "ab"), ask(server, "ab", stream=True), step(server, "i")):
                assert_refused(response, 503, "draining")
            assert get(server, "/status").json()["state"] == "draining"
        for prompt, one in zip(prompts, asked):
            assert one.result(PATIENCE).json()["response"] == answer_alone(prompt)


def test_a_session_has_a_limit_of_its_own() -> None:
    settings = mock_settings(max_queue=8, limits={"requests_per_user": 2})
    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps():
            mine = [in_background(post, server, "/", {"prompt": "ab"}, x_session_id="me")]
            mine.append(in_background(post, server, "/", {"prompt": "cd"}, x_session_id="me"))
            wait_until(lambda: server.service.running == 2)
            response = post(server, "/", {"prompt": "ab"}, x_session_id="me")
            assert_refused(response, 429, "user_busy")
            assert "'anonymous/me' has 2 requests" in response.json()["error"]
            assert "requests_per_user is 2" in response.json()["error"]
            others = [
                in_background(post, server, "/", {"prompt": "ab"}, x_session_id="you"),
                in_background(ask, server, "ab"),
            ]
            wait_until(lambda: server.service.running == 4)
        assert {one.result(PATIENCE).status_code for one in mine + others} == {200}
        assert post(server, "/", {"prompt": "ab"}, x_session_id="me").status_code == 200


def test_a_key_has_a_limit_with_all_its_sessions() -> None:
    settings = mock_settings(max_queue=8, keys=KEYS, limits={"requests_per_key": 2})
    no_such_ids = {"prompt": [10**9]}
    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps():
            mine = [
                in_background(post, server, "/", {"prompt": "ab"}, x_session_id=session, **RED)
                for session in ("a", "b")
            ]
            wait_until(lambda: server.service.running == 2)
            response = post(server, "/", {"prompt": "ab"}, x_session_id="c", **RED)
            assert_refused(response, 429, "key_busy")
            assert "requests_per_key is 2" in response.json()["error"]
            # Before its prompt is tokenized: these ids would be an error of their own.
            assert post(server, "/v1/completions", no_such_ids, **RED).status_code == 429
            other = in_background(post, server, "/", {"prompt": "ab"}, x_session_id="a", **BLUE)
            wait_until(lambda: server.service.running == 3)
        mine.append(other)
        assert {one.result(PATIENCE).status_code for one in mine} == {200}
        assert post(server, "/v1/completions", no_such_ids, **RED).status_code == 400


@pytest.mark.parametrize("session", ["x" * 257, "tab\there"])
def test_a_session_whose_name_cannot_be(session: str) -> None:
    with in_process_server() as server:
        response = post(server, "/", {"prompt": "ab"}, x_session_id=session)
        assert response.status_code == 400
        assert f"has {len(session)} characters" in response.json()["error"]
        assert is_idle(server)


@pytest.mark.parametrize(
    ("sent", "name"),
    [(b"\xe4\xbd\xa0", "\u4f60"), (b"Ren\xc3\xa9", "Ren\u00e9"), (b"Ren\xe9", "Ren\u00e9")],
)
def test_a_session_has_one_name_in_headers_and_bodies(sent: bytes, name: str) -> None:
    settings = mock_settings(limits={"requests_per_user": 1})
    with in_process_server(settings) as server, nothing_stays(server), SingleSteps():
        body = {"model": MODEL, "prompt": "ab", "user": name}
        asked = in_background(post, server, "/v1/completions", body)
        server.wait_until_running(1)
        named = [(b"x-session-id", sent)]
        again = HTTP.post(f"{server.url}/", json={"prompt": "ab"}, headers=named)
        assert_refused(again, 429, "user_busy")
    assert asked.result(PATIENCE).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "outcome", "status"),
    [
        ({"prompt": "question 0", "max_tokens": 3}, "length", 200),
        ({"prompt": "p" + FAILS}, "error", 500),
        ({"prompt": "p" * 96}, "refused", 400),
        ({"prompt": "pppp", "max_length": 4}, "refused", 400),
    ],
)
def test_every_end_is_counted_out(
    body: dict[str, Any], outcome: str, status: int, stream: bool
) -> None:
    settings = mock_settings(limits={"requests_per_user": 1})
    with in_process_server(settings, llm_that_fails) as server, nothing_stays(server):
        for _ in range(3):
            response = post(server, "/", {**body, "stream": stream}, x_session_id="me")
            if outcome == "error" and stream:
                assert response.status_code == 200
                assert events_of(response.text)[-1]["status"] == status
            else:
                assert response.status_code == status
            wait_until(lambda: is_idle(server))
        labels = {"model": MODEL, "outcome": outcome}
        assert server.service.metrics.registry.get_sample_value("glm_requests_total", labels) == 3


def start(server: InProcessServer, *asks: GenerationRequest) -> Any:
    """Starts several answers of one request, on the server's loop."""
    service: Service = server.service
    starting = service.start(Caller(), service.models.get(None), asks)
    return asyncio.run_coroutine_threadsafe(starting, server.loop).result(PATIENCE)


@pytest.mark.parametrize(
    ("asks", "code"),
    [
        (
            [
                GenerationRequest("ab"),
                GenerationRequest("ab"),
                GenerationRequest("ab"),
                GenerationRequest("ab"),
            ],
            "queue_full",
        ),
        (
            [GenerationRequest("ab"), GenerationRequest("ab"), GenerationRequest("p" * 200)],
            "context_length_exceeded",
        ),
        (
            [GenerationRequest("ab"), GenerationRequest("abc", max_length=3)],
            "context_length_exceeded",
        ),
        ([GenerationRequest("ab"), GenerationRequest([])], "invalid_value"),
    ],
)
def test_of_several_answers_all_start_or_none(asks: list[GenerationRequest], code: str) -> None:
    settings = mock_settings(users=1, max_queue=2)
    with in_process_server(settings) as server, nothing_stays(server), SingleSteps() as steps:
        with pytest.raises(APIError) as refused:
            start(server, *asks)
        assert refused.value.code == code
        assert is_idle(server)
        steps.step()  # the engine forgets those that had begun
        assert server.llm().stats().waiting == 0
        assert server.llm().stats().active_users == 0
        three = start(
            server, GenerationRequest("ab"), GenerationRequest("ab"), GenerationRequest("ab")
        )
        assert server.service.admission.in_flight == 3
        for generation in three:
            server.call(generation.close)


def test_a_defect_in_the_middle_of_a_start_leaves_nothing_counted() -> None:
    with in_process_server() as server, nothing_stays(server):
        llm: Any = server.llm()
        submitted: list[Any] = []

        def broken(*args: Any, **named: Any) -> Any:
            if submitted:
                raise ZeroDivisionError("a defect")
            submitted.append(MultiUserLLM.asubmit(llm, *args, **named))
            return submitted[0]

        llm.asubmit = broken
        with pytest.raises(APIError, match="the server failed; its log says why"):
            start(server, GenerationRequest("ab"), GenerationRequest("ab"))
        del llm.asubmit
        assert is_idle(server)


def test_admission_counts_all_or_none() -> None:
    admission = Admission(Limits(requests_per_user=2, requests_per_key=4))
    me, you = Caller("me"), Caller("you")
    releases = [admission.admit(me, "me/a"), admission.admit(me, "me/a")]
    with pytest.raises(APIError, match=r"'me/a' has 2 .* requests_per_user is 2"):
        admission.admit(me, "me/a")
    with pytest.raises(APIError, match=r"'me' has 2 .* asks for 3 more; requests_per_key is 4"):
        admission.admit(me, None, 3)
    assert admission.in_flight == 2
    releases += [admission.admit(you, "you/a", 3)] * 3
    releases += [admission.admit(me, None, 2)] * 2
    for release in releases:
        release()
    assert admission.in_flight == 0
    assert (admission._by_key, admission._by_user) == ({}, {})  # names of the past take no memory


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"limits": {"requests_per_key": 2}}, 2),
        ({"users": 1, "max_queue": 2}, 3),
        ({"limits": {"choices": 4}}, 4),
    ],
)
def test_more_answers_than_an_idle_server_admits_are_no_matter_of_time(
    settings: dict[str, Any], most: int
) -> None:
    body = {"model": MODEL, "prompt": "ab"}
    with in_process_server(mock_settings(**settings)) as server, nothing_stays(server):
        refused = post(server, "/v1/completions", {**body, "n": most + 1})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "n")
        assert f"n is {most + 1} " in error["message"]
        assert f"one request may ask for {most}" in error["message"]
        assert len(post(server, "/v1/completions", {**body, "n": most}).json()["choices"]) == most
        config = get(server, f"/v2/models/{MODEL}/config").json()
        assert config["max_batch_size"] == most


def test_several_answers_are_one_request_of_their_user() -> None:
    admission = Admission(Limits(requests_per_user=1))
    release = admission.admit(Caller(), "me", 8)
    for _ in range(8):
        with pytest.raises(APIError, match="'me' has 1 requests"):
            admission.admit(Caller(), "me")
        release()
    admission.admit(Caller(), "me")


def test_a_session_may_ask_for_several_answers() -> None:
    body = {"model": MODEL, "prompt": "ab", "n": 3, "user": "me"}
    settings = mock_settings(limits={"requests_per_user": 1})
    with in_process_server(settings) as server, nothing_stays(server):
        for _ in range(2):
            assert len(post(server, "/v1/completions", body).json()["choices"]) == 3
