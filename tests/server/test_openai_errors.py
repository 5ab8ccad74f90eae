"""Requests that `/v1/*` rejects, and answers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.errors import APIError, openai_body
from glm_multiuser.server.settings import ModelSettings
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, SEQ_LENGTH, VOCAB, Call
from tests.engine.stepping import SingleSteps
from tests.server.asking import HTTP, in_background, post
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)
from tests.server.openai_reading import (
    CHAT,
    COMPLETIONS,
    question,
    stream_events,
    sync_client,
)

HELLO = question("hello")
ALL_TOKENS = list(range(VOCAB))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "tool", "content": "hi", "tool_call_id": "1"}]}, "messages"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"max_tokens": 5, "extra_body": {"min_tokens": 6}}, "min_tokens"),
    ({"extra_body": {"stop_token_ids": ALL_TOKENS, "min_tokens": 1}}, "min_tokens"),
    ({"n": 9}, "n"),
    ({"seed": -2}, "seed"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"min_p": 1.1}}, "min_p"),
    ({"extra_body": {"continue_final_message": True}}, "messages"),
    (
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
        "add_generation_prompt",
    ),
    ({"extra_body": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"user": "x" * 257}, "user"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {"500000": 100}}, "logit_bias"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"extra_body": {"cache_prompt": 1}}, "cache_prompt"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"extra_body": {"temprature": 1}}, "temprature"),
    ({"extra_headers": {"X-Request-Timeout": "soon"}}, "x-request-timeout"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "param"), BAD, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_of_chat(
    client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            **{"model": MODEL, "messages": HELLO, "stream": stream, **fields}
        )
    assert error.value.param == param
    assert error.value.type == "invalid_request_error"
    assert error.value.code in ("invalid_value", "invalid_session")
    assert (param.split(".")[0] if param != "user" else "session") in error.value.message


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 3}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 9}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"extra_body": {"messages": HELLO}}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=str)
def test_a_wrong_field_of_completions(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**{"model": MODEL, "prompt": "hello", **fields})
    assert (error.value.param, error.value.code) == (param, "invalid_value")


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"seq_length {SEQ_LENGTH}") as error:
        client.chat.completions.create(model=MODEL, messages=question("x" * SEQ_LENGTH))
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=[1] * SEQ_LENGTH)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")


def test_a_body_that_is_no_json(mock: InProcessServer) -> None:
    for body in (b'{"messages":', b"[]", b"", b"5", b"\xff"):
        response = HTTP.post(mock.url + CHAT, content=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", None)


@pytest.mark.parametrize("prompt", [[FAILS_AT_ONCE], [FAILS_LATER, 1]])
def test_an_answer_that_fails(mock: InProcessServer, client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model=MODEL, prompt=prompt)
    assert (error.value.status_code, error.value.code) == (500, "generation_failed")
    *chunks, last = stream_events(mock.url, COMPLETIONS, prompt=prompt)
    assert json.loads(last)["error"]["code"] == "generation_failed"
    assert bool(chunks) == (prompt[0] == FAILS_LATER)
    with pytest.raises(openai.APIError) as streamed:
        list(client.completions.create(model=MODEL, prompt=prompt, stream=True))
    assert streamed.value.code == "generation_failed"


def test_one_answer_of_several_that_fails_ends_all(mock: InProcessServer) -> None:
    prompts = [[1, 2], [FAILS_LATER, 1], [3]]
    *_, last = stream_events(mock.url, COMPLETIONS, prompt=prompts, ignore_eos=True)
    assert json.loads(last)["error"]["code"] == "generation_failed"
    response = HTTP.post(mock.url + COMPLETIONS, json={"prompt": prompts, "ignore_eos": True})
    assert response.status_code == 500
    wait_until(lambda: mock.service.running == 0)


class Held:
    """A model that decodes only while the test lets it."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def open(self, settings: ModelSettings, **options: Any) -> MultiUserLLM:
        return mock_llm(settings, before=self._before, **options)

    def _before(self, call: Call) -> None:
        if call.kind == "decode":
            assert self.go_on.wait(PATIENCE)


@pytest.fixture
def held() -> Iterator[tuple[InProcessServer, Held]]:
    model = Held()
    settings = mock_settings(users=4, max_queue=64, warm_up=())
    with in_process_server(settings, model.open) as server:
        try:
            yield server, model
        finally:
            model.go_on.set()


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    held: tuple[InProcessServer, Held],
) -> None:
    server, model = held
    error = APIError(503, "shutting_down", "the server ends")
    events = []
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=PATIENCE) as response:
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line[len("data: ") :]))
            if len(events) == 2:  # the role and a text
                server.call(lambda: server.service.abort_all(error))
                model.go_on.set()
    *chunks, last = events
    assert last == openai_body(error)
    assert len(chunks) >= 2
    assert all(chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_goes_away_frees_every_slot(
    held: tuple[InProcessServer, Held], stream: bool, count: int
) -> None:
    server, model = held
    body = {"messages": HELLO, "n": count, "stream": stream, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            asking = asyncio.ensure_future(client.post(server.url + CHAT, json=body))
            await asyncio.to_thread(wait_until, lambda: server.service.running == count)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: server.service.running == 0)
    model.go_on.set()
    wait_until(lambda: server.llm().stats().active_users == 0)
    assert server.call(lambda: server.service.admission.in_flight) == 0


def test_a_full_queue_refuses_all_choices_or_none() -> None:
    settings = mock_settings(users=1, max_queue=2)
    with in_process_server(settings) as server, sync_client(server.url) as client:
        with SingleSteps():
            running = in_background(post, server, "/", {"prompt": "ab"})
            server.wait_until_running(1)
            with pytest.raises(openai.RateLimitError) as error:
                client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
            assert error.value.code == "queue_full"
            assert int(error.value.response.headers["retry-after"]) >= 1
            assert server.call(lambda: server.service.running) == 1
        assert running.result(PATIENCE).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [
        ('{"prompt": "你好"}'.encode("gbk"), {}, "must be JSON in UTF-8: 'utf-8' codec"),
        (b"{'prompt': 'a'}", {}, "enclosed in double quotes: line 1 column 2"),
        (b'{"prompt": ' + b"[" * 100_000, {}, "must be JSON in UTF-8: maximum recursion depth"),
        (zlib.compress(b"{}"), {"content-encoding": "deflate"}, "Content-Encoding is 'deflate'"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/"])
def test_a_body_that_cannot_be_read(
    server: InProcessServer, path: str, body: bytes, headers: dict[str, str], told: str
) -> None:
    response = HTTP.post(server.url + path, content=body, headers=headers)
    assert response.status_code == 400
    assert "body: " in response.text
    assert told in response.text


def test_half_of_a_surrogate_pair_in_an_error(server: InProcessServer) -> None:
    offered, wanted = ({"type": "function", "function": {"name": one}} for one in ("\ud800", "f"))
    fields = {"messages": HELLO, "tools": [offered], "tool_choice": wanted}
    response = HTTP.post(server.url + CHAT, content=json.dumps(fields))
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("must be one of tools: \ud800")
