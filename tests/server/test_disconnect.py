"""A client that disconnects frees its resources, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from starlette.requests import Request
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from glm_multiuser.answer import AnswerCollector
from glm_multiuser.engine.request import End, Event, Token
from glm_multiuser.engine.request import Request as EngineRequest
from glm_multiuser.handle import AsyncHandle
from glm_multiuser.sampling import Choice
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.server import step as step_api
from glm_multiuser.server.disconnect import ClientDisconnected, unless_disconnected
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.http_protocol import PIPELINED
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.settings import Limits
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.mock_runner import EOS, VOCAB
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    Wire,
    answer_alone,
    ask,
    in_background,
    long_prompts,
    nothing_stays,
    step,
    step_to_end,
    tasks_of,
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

LARGE = 2 * HIGH_WATER_LIMIT
"""Bytes of a body; uvicorn stops reading at half of it."""

STEP_SECONDS = 0.02
"""How long the step API waits for a client to come back, in these tests."""

Ending = Callable[[Wire], None]

WAITING = "Entry.receive"
"""What the step API does until there is something to return."""


def simple(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    return "/", {"prompt": prompt, "stream": stream}


def chat(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, "stream": stream}


def completion(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": prompt, "n": 1, "stream": stream}


def generate(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    return f"/v2/models/{MODEL}/generate{'_stream' * stream}", {"text_input": prompt}


def infer(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    tensor = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": [prompt]}
    return f"/v2/models/{MODEL}/infer", {"inputs": [tensor]}


def stepwise(prompt: str, stream: bool) -> tuple[str, dict[str, Any]]:
    return "/llm/generate", {"cache_id": "an id", "query": prompt}


STREAMS = [simple, chat, completion, generate]
WHOLES = [*STREAMS, infer, stepwise]
CASES = [
    *((one, True, Wire.close) for one in STREAMS),
    *((one, False, Wire.close) for one in WHOLES),
    (simple, True, Wire.reset),
    (simple, False, Wire.reset),
]
NAMES = [
    f"{one.__name__}-{'stream' if stream else 'whole'}-{end.__name__}" for one, stream, end in CASES
]

of_every_protocol = pytest.mark.parametrize(("body_of", "stream", "end"), CASES, ids=NAMES)


def server_of(users: int) -> Any:
    return in_process_server(mock_settings(users=users, limits={"step_seconds": STEP_SECONDS}))


def assert_is_taken(server: InProcessServer, count: int) -> None:
    server.wait_until_running(count)
    assert server.call(lambda: server.service.admission.in_flight) == count


@of_every_protocol
def test_who_goes_away_while_waiting_for_a_slot_leaves_the_queue(
    body_of: Any, stream: bool, end: Ending
) -> None:
    first, second = long_prompts(2)
    with server_of(users=1) as server, nothing_stays(server):
        with SingleSteps() as steps:
            running = in_background(ask, server, first)
            assert_is_taken(server, 1)
            steps.step()
            leaver = Wire(server.url).request(*body_of(second, stream))
            assert_is_taken(server, 2)
            assert server.llm().stats().waiting == 1
            end(leaver)
            # Nothing is sent to it: the end of the connection itself is noticed.
            assert_is_taken(server, 1)
            steps.step()
            steps.step()
            assert server.llm().stats().waiting == 0
            assert server.llm().stats().active_users == 1
        assert running.result(PATIENCE).json()["response"] == answer_alone(first)


@of_every_protocol
def test_who_goes_away_in_the_middle_of_an_answer_frees_the_slot(
    body_of: Any, stream: bool, end: Ending
) -> None:
    first, second = long_prompts(2)
    with server_of(users=2) as server, nothing_stays(server):
        with SingleSteps() as steps:
            running = in_background(ask, server, first)
            assert_is_taken(server, 1)
            leaver = Wire(server.url).request(*body_of(second, stream))
            assert_is_taken(server, 2)
            steps.step()
            steps.step()
            # A call of the step API has its answer by now, and may be given up at the next step.
            assert server.llm().stats().active_users == 2
            steps.step()
            steps.step()
            if stream:
                leaver.read_until(b"data: {")
            end(leaver)
            assert_is_taken(server, 1)
            steps.step()
            steps.step()
            assert server.llm().stats().active_users == 1
            assert [slot.state for slot in server.llm().slots()] == ["decode", "free"]
        assert running.result(PATIENCE).json()["response"] == answer_alone(first)


BEHIND: dict[str, list[Any]] = {
    "a small one": [{}],
    "a large one": ["x" * LARGE],
    "the most of them": [{}] * PIPELINED,
}
"""Bodies of the requests that wait for an earlier one."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", BEHIND)
def test_who_goes_away_with_other_requests_in_the_pipeline_frees_the_slot(
    behind: str, stream: bool
) -> None:
    with server_of(users=1) as server, nothing_stays(server), SingleSteps() as steps:
        leaver = Wire(server.url).request(*chat(long_prompts(1)[0], stream))
        assert_is_taken(server, 1)
        for body in BEHIND[behind]:
            leaver.request("/", body)
        steps.step()
        leaver.close()
        assert_is_taken(server, 0)
        steps.step()
        steps.step()
        assert server.llm().stats().active_users == 0


TOO_MUCH: dict[str, list[Any]] = {
    "too many": [{}] * (PIPELINED + 1),
    "too large": ["x" * LARGE] * (Limits().body_bytes // LARGE + 1),
}


@pytest.mark.parametrize("behind", TOO_MUCH)
def test_who_sends_too_much_behind_a_request_is_disconnected(behind: str) -> None:
    with server_of(users=1) as server, nothing_stays(server), SingleSteps() as steps:
        wire = Wire(server.url).request(*chat(long_prompts(1)[0], True))
        assert_is_taken(server, 1)
        steps.step()
        with contextlib.suppress(OSError):
            for body in TOO_MUCH[behind]:
                wire.request("/", body)
        wire.read_to_end()
        assert_is_taken(server, 0)
        wire.close()


def test_who_goes_away_before_the_body_is_whole_has_asked_nothing() -> None:
    with in_process_server() as server, nothing_stays(server):
        wire = Wire(server.url)
        wire.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        wire.close()
        assert ask(server, "ab").status_code == 200
        assert server.service.requests == 1


def test_a_slot_that_was_left_is_taken_by_the_next_in_the_queue() -> None:
    first, second, third = long_prompts(3)
    with server_of(users=1) as server, nothing_stays(server):
        with SingleSteps() as steps:
            leaver = Wire(server.url).request(*simple(first, True))
            assert_is_taken(server, 1)
            asked = [in_background(ask, server, second)]
            assert_is_taken(server, 2)
            asked.append(in_background(ask, server, third))
            assert_is_taken(server, 3)
            steps.step()
            leaver.close()
            assert_is_taken(server, 2)
            steps.step()
            steps.step()
            assert server.llm().stats().waiting == 1
        for prompt, one in zip((second, third), asked):
            assert one.result(PATIENCE).json()["response"] == answer_alone(prompt)


def test_all_answers_of_one_request_end_with_it() -> None:
    body = {"model": MODEL, "prompt": long_prompts(3), "stream": False}
    with server_of(users=2) as server, nothing_stays(server), SingleSteps() as steps:
        leaver = Wire(server.url).request("/v1/completions", body)
        assert_is_taken(server, 3)
        steps.step()
        leaver.close()
        assert_is_taken(server, 0)
        steps.step()
        steps.step()
        stats = server.llm().stats()
        assert (stats.active_users, stats.waiting) == (0, 0)


def test_calls_of_the_step_api_whose_clients_go_away_lose_no_text() -> None:
    (prompt,) = long_prompts(1)
    texts = []
    with in_process_server() as server, nothing_stays(server):
        with SingleSteps() as steps:
            for _ in range(3):
                leaver = Wire(server.url).request(*stepwise(prompt, False))
                wait_until(lambda: WAITING in tasks_of(server))
                leaver.close()
                wait_until(lambda: WAITING not in tasks_of(server))
                steps.step()
                texts.append(step(server, "an id").json()["delta_text"])
        assert all(texts)
        assert "".join(texts) + step_to_end(server, "an id") == answer_alone(prompt)


class Talk:
    """One generation of the step API whose engine and clients are this test."""

    def __init__(self) -> None:
        request = EngineRequest([1], SamplingParams(), "me", (EOS,), 50, VOCAB, lambda event: None)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        handle = AsyncHandle(AnswerCollector(request, FakeTokenizer()), self.events, lambda: None)
        self.entries = step_api.Entries(Limits())
        self.entry = self.entries.find(("anonymous", "an id"))
        self.entry.generation = Generation(handle, 60.0, lambda generation, how: None, 60.0)

    def say(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self.events.put_nowait(Token(Choice(token_id, None, None), 1.0))

    def end(self) -> None:
        self.events.put_nowait(End("stop", None, 0.0, 1.0))

    async def call(self, gone: asyncio.Event) -> Any:
        """One call by a client that is there until `gone` is set."""

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        state = SimpleNamespace(step_entries=self.entries)
        scope = {
            "type": "http",
            "app": SimpleNamespace(state=state),
            "state": {"caller": Caller()},
            "headers": [],
        }
        request = Request(scope, receive)
        return await step_api.generate(
            request, step_api.StepRequest.model_validate({"cache_id": "an id"})
        )


@pytest.mark.parametrize("turns", range(-4, 5))
@pytest.mark.parametrize("whole", [False, True], ids=["a piece", "the end"])
def test_text_that_comes_just_as_the_client_goes_is_there_for_the_next_call(
    turns: int, whole: bool
) -> None:
    """`turns` of the event loop lie between the two."""

    async def scenario() -> list[Any]:
        talk, gone = Talk(), asyncio.Event()

        def speak() -> None:
            talk.say(1, 2)
            if whole:
                talk.end()

        first, second = (speak, gone.set) if turns > 0 else (gone.set, speak)
        calling = asyncio.ensure_future(talk.call(gone))
        for _ in range(5):
            await asyncio.sleep(0)  # until it waits
        first()
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        second()
        answers = []
        with contextlib.suppress(ClientDisconnected):
            answers.append(await calling)
        if not whole:
            talk.end()
        if not answers or answers[-1].flag != "end":
            answers.append(await talk.call(asyncio.Event()))
        assert len(talk.entries) == 0
        return answers

    answers = asyncio.run(scenario())
    assert "".join(answer.delta_text for answer in answers) == "abc"
    assert [answer.flag for answer in answers][-1] == "end"


def test_a_failure_that_comes_just_as_the_client_goes_is_told_to_the_next_call() -> None:
    async def scenario() -> None:
        talk, gone = Talk(), asyncio.Event()
        calling = asyncio.ensure_future(talk.call(gone))
        for _ in range(5):
            await asyncio.sleep(0)
        gone.set()
        talk.events.put_nowait(End("error", None, 0.0, 1.0))
        with pytest.raises(ClientDisconnected):
            await calling
        with pytest.raises(Exception, match="the request failed"):
            await talk.call(asyncio.Event())
        assert len(talk.entries) == 0

    asyncio.run(scenario())


def test_work_is_over_when_its_client_is_known_to_be_gone() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(Request({"type": "http"}, receive), work())
        assert ended == ["work"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_nothing_is_given_out_to_a_client_that_is_gone_already() -> None:
    async def work() -> str:
        return "an answer"

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        with pytest.raises(ClientDisconnected):
            await unless_disconnected(Request({"type": "http"}, receive), work())

    asyncio.run(scenario())
