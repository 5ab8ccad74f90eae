"""`/v1/responses`: the official client, its tools, streams and stored responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Optional

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.response_store import ResponseStore
from glm_multiuser.server.settings import Limits
from tests.server.anthropic_reading import named_events
from tests.server.asking import FAILS, HTTP, KEYS, RED, get, llm_that_fails, post
from tests.server.echoing import SEQ_LENGTH, call, echo_llm, message, together
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import (
    CHAT,
    _unknown_fields,
    ask,
    async_client,
    parse,
    question,
    sync_client,
)

RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("get_weather", "get_time")
]
CALL = call("get_weather", city="北京")
ARGUMENTS = '{"city": "北京"}'
WEATHER = ("get_weather", ARGUMENTS)
VENDOR = {"store", "name"}
"""OpenAI's API has `store`, its client's type has not; `name` of events only some versions have."""
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that answers with the last message."""
    settings = mock_settings(users=4, max_queue=64, keys=KEYS)
    with in_process_server(settings, echo_llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(echo: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(echo.url, api_key=KEYS["red"]) as client:
        yield client


CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


def output_of(call_id: str, text: str) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def calls_of(response: Response) -> list[tuple[str, str]]:
    calls = [one for one in response.output if isinstance(one, ResponseFunctionToolCall)]
    assert all(one.call_id.startswith("call_") and one.id != one.call_id for one in calls)
    return [(one.name, one.arguments) for one in calls]


def both_ways(client: openai.OpenAI, says: Any, **fields: Any) -> Response:
    """A response that must be the same streamed and not, but for its ids."""
    body: Any = {"model": MODEL, "input": says, **fields}
    whole = client.responses.create(**body)
    parse(Response, whole.to_dict(mode="json"), VENDOR)
    *_, last = client.responses.create(stream=True, **body)
    assert last.type == f"response.{whole.status}"
    streamed = last.response
    assert (streamed.output_text, calls_of(streamed)) == (whole.output_text, calls_of(whole))
    for name in ("status", "usage", "incomplete_details", "tool_choice", "text", "metadata"):
        assert getattr(streamed, name) == getattr(whole, name)
    assert whole.id.startswith("resp_")
    assert streamed.id != whole.id
    return whole


@pytest.mark.parametrize(
    ("says", "fields", "text", "calls", "status"),
    [
        (message("你好"), {}, "你好", [], "completed"),
        (message("one two"), {"max_output_tokens": 5}, "one", [], "incomplete"),
        (message("one two"), {"extra_body": {"stop": " t"}}, "one", [], "completed"),
        (CALL, {"tools": TOOLS}, "", [WEATHER], "completed"),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}, CALL, [], "completed"),
        (
            together(message("wait"), CALL, call("get_time", n=1)),
            {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
            "wait",
            [WEATHER, ("get_time", '{"n": 1}')],
            "completed",
        ),
        ("", {}, "", [], "completed"),
    ],
)
def test_a_response(
    client: openai.OpenAI, says: str, fields: Any, text: str, calls: Any, status: str
) -> None:
    response = both_ways(client, says, **fields)
    assert (response.output_text, calls_of(response)) == (text, calls)
    assert response.status == status
    details = response.incomplete_details
    assert (details and details.reason) == ("max_output_tokens" if status == "incomplete" else None)
    assert len(response.output) == (bool(text) + len(calls) or 1)


def test_a_response_says_what_was_asked_for(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input=message("hi"),
        instructions="be",
        temperature=0.5,
        metadata={"a": "b"},
        tools=TOOLS,
        truncation="disabled",
        reasoning={"effort": "none"},
        text={"format": {"type": "text"}},
        include=["reasoning.encrypted_content"],
        user="me",
    )
    assert response.output_text == "hi"
    assert (response.instructions, response.temperature) == ("be", 0.5)
    assert (response.metadata, response.user, response.to_dict()["store"]) == (
        {"a": "b"},
        "me",
        False,
    )
    assert [tool.name for tool in response.tools if tool.type == "function"] == [
        "get_weather",
        "get_time",
    ]


def test_the_answer_is_that_of_the_chat() -> None:
    messages = [{"role": "system", "content": "be"}, *question("hello")]
    with in_process_server() as server, sync_client(server.url) as client:
        chat = ask(server.url, CHAT, messages=messages, logprobs=True, top_logprobs=2)
        response = both_ways(client, "hello", instructions="be", include=LOGPROBS, top_logprobs=2)
        assert response.output_text == chat.choices[0].text
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage["prompt_tokens"]
        assert response.usage.output_tokens == chat.usage["completion_tokens"]
        (item,) = response.output
        assert item.type == "message"
        part: Any = item.content[0].to_dict()
        assert part["logprobs"] == chat.choices[0].logprobs["content"]
        without = both_ways(client, "hello", instructions="be", top_logprobs=2)
        assert without.output_text == response.output_text
        assert without.top_logprobs == 2
        (item,) = without.output
        assert item.type == "message"
        assert item.content[0].to_dict()["logprobs"] == []


def test_a_stream_has_every_event_in_its_order() -> None:
    says = together(message("ok"), CALL)
    with in_process_server(mock_settings(), echo_llm) as server:
        events = named_events(server.url, RESPONSES, input=says, tools=TOOLS, include=LOGPROBS)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    for one in events:
        parsed = EVENT.validate_json(json.dumps(one), strict=True)
        assert set(_unknown_fields(parsed)) <= VENDOR, one
    kinds = [one["type"].removeprefix("response.") for one in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    texts = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    logprobs = [entry for one in events if "delta" in one for entry in one.get("logprobs", ())]
    (done,) = [one for one in events if one["type"] == "response.output_text.done"]
    assert ("".join(texts), logprobs) == (done["text"], done["logprobs"])
    assert len(logprobs) == events[-1]["response"]["usage"]["output_tokens"] - 1
    items = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == items
    assert {one["item_id"] for one in events if "item_id" in one} == {one["id"] for one in items}


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    says = together(message("wait"), CALL)
    with client.responses.stream(model=MODEL, input=says, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == final.output_text == "wait"
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == ARGUMENTS
    assert calls_of(final) == [WEATHER]


def test_the_results_of_tools(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "tools": TOOLS}
    asked: Any = question(together(call("get_time"), CALL))
    first = client.responses.create(input=asked, **body)
    calls = [one for one in first.output if isinstance(one, ResponseFunctionToolCall)]
    results: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": one.call_id,
            "output": message(f"of {one.name}"),
        }
        for one in calls
    ]
    reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    for given in (results, results[::-1]):
        final = client.responses.create(input=[*asked, reasoning, *first.output, *given], **body)
        assert final.output_text == "of get_weather"
    messages: list[Any] = [
        *asked,
        *first.output,
        *results,
        *final.output,
        *question(message("bye")),
    ]
    assert client.responses.create(input=messages, model=MODEL).output_text == "bye"


def test_responses_are_stored_for_a_session(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "tools": TOOLS, "store": True, "user": "me"}
    mine: Any = {"X-Session-Id": "me"}
    first = client.responses.create(input=CALL, instructions="be brief", **body)
    assert first.to_dict()["store"] is True
    (called,) = first.output
    assert isinstance(called, ResponseFunctionToolCall)
    assert client.responses.retrieve(first.id, extra_headers=mine) == first

    output = output_of(called.call_id, message("21 degrees"))
    body["previous_response_id"] = first.id
    second = client.responses.create(input=[output], **body)
    assert (second.output_text, second.previous_response_id) == ("21 degrees", first.id)
    assert second.usage is not None
    items: Any = [*question(CALL), called, output]
    whole = client.responses.create(input=items, model=MODEL, tools=TOOLS)
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens, "instructions are not kept"
    assert second.usage.input_tokens_details.cached_tokens > 0
    third = client.responses.create(
        model=MODEL, input=message("bye"), previous_response_id=second.id, user="me", tools=TOOLS
    )
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id, extra_headers=mine)

    client.responses.delete(first.id, extra_headers=mine)
    for act in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(first.id, extra_headers=mine)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input=[output], **body)
    assert client.responses.retrieve(second.id, extra_headers=mine).output_text == "21 degrees"


def test_nobody_else_finds_a_stored_response(echo: InProcessServer, client: openai.OpenAI) -> None:
    """Another key's, or session's, is as one that never was."""
    body: Any = {"model": MODEL, "input": "secret", "store": True, "user": "me"}
    kept = client.responses.create(**body)
    never = "resp_" + "0" * 32
    for key, session in (("blue", "me"), ("red", "you"), ("red", ""), ("blue", "")):
        headers = {"authorization": f"Bearer {KEYS[key]}", "x_session_id": session}
        heard = []
        for one in (kept.id, never):
            path = f"{RESPONSES}/{one}"
            follow_up = {"input": "x", "previous_response_id": one}
            answers = [get(echo, path, **headers), post(echo, RESPONSES, follow_up, **headers)]
            assert [answer.status_code for answer in answers] == [404, 400]
            heard.append([answer.text.replace(one, "ID") for answer in answers])
        assert heard[0] == heard[1]
    with sync_client(echo.url, api_key=KEYS["blue"]) as blue, pytest.raises(openai.NotFoundError):
        blue.responses.delete(kept.id, extra_headers={"X-Session-Id": "me"})
    assert client.responses.retrieve(kept.id, extra_headers={"X-Session-Id": "me"}) == kept


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
        "input[0] has call_id",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 101}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"metadata": {"x": "y" * 513}}, "metadata.x"),
    ({"extra_body": {"inputs": 1}}, "inputs"),
]


@pytest.mark.parametrize(("fields", "field"), BAD, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field(client: openai.OpenAI, fields: Any, field: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**{"model": MODEL, "input": "x", "stream": stream, **fields})
    assert error.value.type == "invalid_request_error"
    assert (error.value.param or "").startswith(field.partition("[")[0])
    assert field.rpartition(".")[2] in error.value.message


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ('"tools": [{"type": "function", "name": "f", "parameters": {"x": NaN}}]', "parameters"),
        ('"tools": [{"type": "function", "name": "f", "parameters": {"x": 1e999}}]', "parameters"),
        (r'"tools": [{"type": "function", "name": "f", "description": "\ud800"}]', "description"),
        (r'"tools": [{"type": "function", "name": "\ud800"}]', "name"),
        ('"text": {"format": {"type": "text", "schema": {"x": [NaN]}}}', "text.format.schema"),
        (r'"text": {"format": {"type": "text", "name": "\ud800"}}', "text.format.name"),
        (r'"instructions": "\ud800"', "instructions"),
        (r'"user": "\ud800"', "user"),
    ],
)
def test_what_is_repeated_must_be_json(echo: InProcessServer, written: str, field: str) -> None:
    body = f'{{"input": "x", "tool_choice": "none", {written}}}'
    headers = {**RED, "X-Session-Id": "a"}
    response = HTTP.post(f"{echo.url}/v1/responses", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"].endswith(field)


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"seq_length {SEQ_LENGTH}") as error:
        client.responses.create(model=MODEL, input="x" * SEQ_LENGTH)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")


def test_an_answer_that_fails() -> None:
    with in_process_server(open_llm=llm_that_fails) as server, sync_client(server.url) as client:
        with pytest.raises(openai.InternalServerError) as error:
            client.responses.create(model=MODEL, input=FAILS)
        assert error.value.code == "generation_failed"
        events = list(client.responses.create(model=MODEL, input=FAILS, stream=True))
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        # It is not stored.
        body: Any = {"model": MODEL, "input": FAILS, "store": True, "user": "me", "stream": True}
        failed = list(client.responses.create(**body))[-1]
        assert failed.type == "response.failed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(failed.response.id, extra_headers={"X-Session-Id": "me"})


def test_the_async_client_with_many_streams_at_once(echo: InProcessServer) -> None:
    async def run() -> None:
        async with async_client(echo.url, api_key=KEYS["blue"]) as client:

            async def called(number: int) -> Any:
                says = together(message(f"{number}"), call("get_time", n=number))
                stream = await client.responses.create(
                    model=MODEL, input=says, tools=TOOLS, stream=True
                )
                events = [event async for event in stream]
                assert events[-1].type == "response.completed"
                return events[-1].response.output_text, calls_of(events[-1].response)

            answers = await asyncio.gather(*map(called, range(12)))
            assert answers == [(str(n), [("get_time", json.dumps({"n": n}))]) for n in range(12)]

    asyncio.run(run())


def test_the_store_forgets_what_was_not_used_for_longest() -> None:
    def put(user: str, name: str, size: int = 20) -> None:
        store.put(user, {"id": name}, [{"content": "x" * size}])

    def has(user: Optional[str], name: str) -> bool:
        try:
            return bool(store.get(user, name).response)
        except APIError:
            return False

    store = ResponseStore(Limits(response_bytes=300))
    for number in range(9):
        put("red/a", str(number))
        assert has("red/a", "0"), "it was used"
    kept = [number for number in range(9) if has("red/a", str(number))]
    assert 2 < len(kept) < 9
    assert kept == [0, *range(10 - len(kept), 9)]
    # Another key's half is taken from the key that stores most, and never the other way round.
    put("blue/a", "1")
    for number in range(9):
        put("red/b", str(number))
    assert has("blue/a", "1")
    assert not has("red/a", "1")
    assert not has("blue/b", "1")
    assert not has(None, "1")
    put("red/a", "large", size=300)
    assert not has("red/a", "large")
    assert has("red/b", "8"), "others make no room for what is too large"
    assert has("blue/a", "1")
    store.delete("blue/a", "1")
    for user in ("blue/a", None):
        with pytest.raises(APIError, match="response_id is '1'; this session has no such response"):
            store.delete(user, "1")
    for number in range(9):
        if has("red/b", str(number)):
            store.delete("red/b", str(number))
    assert sum(store._bytes_of.values()) == 0
