"""`/v1/messages`: the official client, its tools, streams and sessions."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ToolUseBlock

from tests.server.anthropic_reading import (
    EVENT,
    MESSAGES,
    anthropic_client,
    async_anthropic_client,
    calls_of,
    named_events,
    text_of,
    unknown_fields,
)
from tests.server.echoing import call, echo_llm, message, together
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, OPTIONS, ask, question

TOOLS: Any = [
    {
        "name": name,
        "description": "What it is there.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("get_weather", "get_time")
]
CALL = call("get_weather", city="北京")


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that answers with the last message."""
    with in_process_server(mock_settings(users=4, max_queue=64), echo_llm) as server:
        yield server


@pytest.fixture(scope="module")
def client(echo: InProcessServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(echo.url) as client:
        yield client


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def both_ways(client: anthropic.Anthropic, says: str, **fields: Any) -> Message:
    """An answer that must be the same streamed and not, but for ids of calls and its own."""
    body: Any = {"model": MODEL, "max_tokens": 2000, "messages": user(says), **fields}
    whole = client.messages.create(**body)
    assert not set(unknown_fields(whole))
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert streamed.id != whole.id
    for one in (whole, streamed):
        assert one.id.startswith("msg_")
        calls = [block for block in one.content if isinstance(block, ToolUseBlock)]
        assert all(block.id.startswith("toolu_") for block in calls)
    assert (text_of(streamed), calls_of(streamed)) == (text_of(whole), calls_of(whole))
    for name in ("stop_reason", "stop_sequence", "usage", "model"):
        assert getattr(streamed, name) == getattr(whole, name)
    return whole


@pytest.mark.parametrize(
    ("says", "fields", "text", "calls", "reason"),
    [
        (message("你好"), {}, "你好", [], "end_turn"),
        (message("one two"), {"max_tokens": 5}, "one", [], "max_tokens"),
        (message("one two"), {"stop_sequences": ["x", " t"]}, "one", [], "stop_sequence"),
        (message("get_time"), {"tools": TOOLS}, "get_time", [], "end_turn"),
        (CALL, {"tools": TOOLS}, "", [("get_weather", {"city": "北京"})], "tool_use"),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "none"}}, CALL, [], "end_turn"),
        (
            together(message("wait"), CALL, call("get_time", n=1)),
            {"tools": TOOLS, "tool_choice": {"type": "auto"}},
            "wait",
            [("get_weather", {"city": "北京"}), ("get_time", {"n": 1})],
            "tool_use",
        ),
        ("", {}, "", [], "end_turn"),
    ],
)
def test_an_answer(
    client: anthropic.Anthropic, says: str, fields: Any, text: str, calls: Any, reason: str
) -> None:
    answer = both_ways(client, says, **fields)
    assert (text_of(answer), calls_of(answer), answer.stop_reason) == (text, calls, reason)
    assert answer.stop_sequence == (" t" if reason == "stop_sequence" else None)
    assert len(answer.content) == bool(text) + len(calls)
    assert (answer.model, answer.role, answer.type) == (MODEL, "assistant", "message")


def test_input_has_the_nearest_number_that_json_can_write(client: anthropic.Anthropic) -> None:
    says = 'get_weather\ntool_call(**{"city": 1e999})'
    body: Any = {"model": MODEL, "max_tokens": 100, "messages": user(says), "tools": TOOLS}
    assert calls_of(client.messages.create(**body)) == [
        ("get_weather", {"city": sys.float_info.max})
    ]


def test_the_answer_is_that_of_the_chat(echo: InProcessServer, client: anthropic.Anthropic) -> None:
    chat = ask(echo.url, CHAT, messages=[{"role": "system", "content": "be"}, *question("hello")])
    answer = both_ways(client, "hello", system=[{"type": "text", "text": "be"}])
    assert chat.usage is not None
    assert text_of(answer) == chat.choices[0].text
    assert answer.usage.input_tokens == chat.usage["prompt_tokens"]
    assert answer.usage.output_tokens == chat.usage["completion_tokens"]


def test_a_stream_has_every_event_in_its_order(echo: InProcessServer) -> None:
    says = together(message("ok"), CALL)
    body: Any = {"max_tokens": 2000, "messages": user(says), "tools": TOOLS}
    events = named_events(echo.url, MESSAGES, **body)
    for one in events:
        if one["type"] != "ping":
            assert not set(unknown_fields(EVENT.validate_json(json.dumps(one), strict=True)))
    deltas = sum(one.get("delta", {}).get("type") == "text_delta" for one in events)
    assert [one["type"] for one in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert [one["index"] for one in events if "index" in one] == [0] * (deltas + 2) + [1] * 3
    first = events[0]["message"]
    assert (first["content"], first["stop_reason"]) == ([], None)
    assert first["usage"]["input_tokens"] > 0
    (arguments,) = [
        one["delta"]["partial_json"] for one in events if "partial_json" in one.get("delta", {})
    ]
    assert json.loads(arguments) == {"city": "北京"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_the_results_of_tools(client: anthropic.Anthropic) -> None:
    body: Any = {"model": MODEL, "max_tokens": 2000, "tools": TOOLS}
    asked = user(together(call("get_time"), CALL))
    first = client.messages.create(messages=asked, **body)
    calls = [block for block in first.content if isinstance(block, ToolUseBlock)]
    assert [block.name for block in calls] == ["get_time", "get_weather"]
    results: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": message(f"of {block.name}")}],
        }
        for block in calls
    ]
    asked += [{"role": "assistant", "content": first.content}]
    for given in (results, results[::-1]):
        with_results = [*asked, {"role": "user", "content": given}]
        final = client.messages.create(messages=with_results, **body)
        assert text_of(final) == "of get_weather"  # the model gets them in the order of its calls
    text = {"type": "text", "text": message("and now"), "cache_control": {"type": "ephemeral"}}
    both = [*asked, {"role": "user", "content": [*results, text]}]
    assert text_of(client.messages.create(messages=both, **body)) == "and now"
    empty: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "is_error": True} for block in calls
    ]
    final = client.messages.create(messages=[*asked, {"role": "user", "content": empty}], **body)
    assert text_of(final) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_own_loop_over_tools(client: anthropic.Anthropic, stream: bool) -> None:
    """It asks for a stored conversation, and goes on without one when that is rejected."""

    @anthropic.beta_tool
    def get_time(city: str) -> str:
        """The time there."""
        return message(f"noon in {city}")

    body: Any = {"model": MODEL, "max_tokens": 2000, "tools": [get_time], "stream": stream}
    asked = user(call("get_time", city="北京"))
    final = client.beta.messages.tool_runner(messages=asked, **body).until_done()
    assert [block.text for block in final.content if block.type == "text"] == ["noon in 北京"]


def test_what_changes_no_answer_is_accepted(client: anthropic.Anthropic) -> None:
    thought: Any = {"type": "thinking", "thinking": "hm", "signature": "x"}
    content = [thought, {"type": "text", "text": "b"}]
    before: Any = [*user("a"), {"role": "assistant", "content": content}]
    answer = both_ways(
        client,
        "",
        messages=[*before, *user(message("hello"))],
        thinking={"type": "disabled"},
        metadata={"user_id": "user_1_account__session_2"},
        service_tier="auto",
        output_config={"effort": "high"},
        extra_body={"cache_control": {"type": "ephemeral"}, "cache_prompt": False},
        extra_headers={"anthropic-beta": "something-2025-01-01"},
    )
    assert text_of(answer) == "hello"


def test_an_assistants_last_message_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*user("x"), {"role": "assistant", "content": "the beginning"}]
    assert text_of(both_ways(client, "", messages=begun)) == "the beginning"


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    for fields in ({}, {"tools": TOOLS}, {"system": "be brief", "tools": TOOLS[:1]}):
        body: Any = {"model": MODEL, "messages": user("hello " * 900), **fields}
        count = client.messages.count_tokens(**body)
        answer = client.messages.create(max_tokens=1, **body) if count.input_tokens < 4000 else None
        assert answer is None or answer.usage.input_tokens == count.input_tokens
        assert count.input_tokens > 900


def test_a_session_keeps_its_prefix(client: anthropic.Anthropic) -> None:
    """`metadata.user_id` and the header name it; the header goes first."""
    history = user("a" * 100)
    sessions: list[Any] = [
        {"metadata": {"user_id": "mine"}},
        {"extra_headers": {"X-Session-Id": "mine"}, "metadata": {"user_id": "another"}},
        {"metadata": {"user_id": "another"}},
        {"metadata": {"user_id": "another"}, "extra_body": {"cache_prompt": False}},
        {},
    ]
    cached = []
    for fields in sessions:
        answer = client.messages.create(model=MODEL, max_tokens=1, messages=history, **fields)
        assert answer.usage.cache_read_input_tokens is not None
        cached.append(answer.usage.cache_read_input_tokens)
        assert answer.usage.input_tokens + cached[-1] == 101
    assert cached == [0, 100, 0, 0, 0]


def test_the_async_client_with_many_streams_at_once(echo: InProcessServer) -> None:
    async def run() -> None:
        async with async_anthropic_client(echo.url) as client:

            async def called(number: int) -> Any:
                body: Any = {"model": MODEL, "max_tokens": 2000, "tools": TOOLS}
                says = user(together(message(f"{number}"), call("get_time", n=number)))
                async with client.messages.stream(messages=says, **body) as stream:
                    texts = [text async for text in stream.text_stream]
                    final = await stream.get_final_message()
                assert "".join(texts) == text_of(final)
                return text_of(final), calls_of(final)

            answers = await asyncio.gather(*map(called, range(12)))
            assert answers == [(str(n), [("get_time", {"n": n})]) for n in range(12)]

    asyncio.run(run())


def test_ids_of_requests(echo: InProcessServer, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=user("x"))
    assert answer._request_id
    body = {"max_tokens": 1, "messages": user("x")}
    response = httpx.post(echo.url + MESSAGES, json=body, headers={"x-request-id": "1"}, **OPTIONS)
    assert response.headers["request-id"] == response.headers["x-request-id"] == "1"
