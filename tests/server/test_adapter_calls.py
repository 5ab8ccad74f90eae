"""Tool calls in `/v1/messages` and `/v1/responses`: several at once, and text that is no call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Callable

import anthropic
import openai
import pytest
from openai.types.responses import Response

from tests.server import test_anthropic, test_responses_api
from tests.server.anthropic_reading import MESSAGES, anthropic_client, calls_of, named_events
from tests.server.anthropic_reading import text_of as text_of_message
from tests.server.echoing import (
    call,
    echo_llm,
    message,
    tagged_call,
    tagged_echo_llm,
    together,
)
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, ask_both_ways, question, sync_client
from tests.server.test_responses_api import RESPONSES

Calls = list[tuple[str, Any]]

CHATGLM3, QWEN = "chatglm3", "qwen"
WEATHER, TIME = call("get_weather", city="北京"), call("get_time", city="x", n=1)
TAGGED = tagged_call("get_weather", city="北京"), tagged_call("get_time", city="x", n=1)
BOTH: Calls = [("get_weather", {"city": "北京"}), ("get_time", {"city": "x", "n": 1})]
PARALLEL = [
    (CHATGLM3, together(WEATHER, TIME), ""),
    (CHATGLM3, together(message("both"), WEATHER, TIME), "both"),
    (QWEN, "\n".join(TAGGED), ""),
    (QWEN, "\n".join(["both", *TAGGED]), "both"),
]
NAMESPACE: Any = {
    "type": "namespace",
    "name": "clock",
    "description": "Tells the time.",
    "tools": [{**tool, "description": "d"} for tool in test_responses_api.TOOLS],
}
WITH_NAMESPACE: Any = [*test_responses_api.TOOLS, NAMESPACE]
NO_CALLS = {
    "in a code block": (CHATGLM3, message(f"Write:\n```\n{WEATHER}\n```")),
    "in a sentence": (CHATGLM3, message(f"I would call {WEATHER} now.")),
    "half a call": (CHATGLM3, WEATHER[:-4]),
    "a name alone": (CHATGLM3, "get_weather"),
    "of no tool": (CHATGLM3, call("get_news", city="x")),
    "with code": (CHATGLM3, WEATHER.replace("'北京'", "open('x')")),
    "half a tagged call": (QWEN, TAGGED[0][:-4]),
    "an opening tag alone": (QWEN, "<tool_call>"),
    "a tagged call of no tool": (QWEN, tagged_call("get_news", city="x")),
    "a tagged call in a code block, half": (QWEN, f"```\n{TAGGED[0][:-12]}\n```"),
    "tags without JSON": (QWEN, "<tool_call>\nget_weather\n</tool_call>"),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, InProcessServer]]:
    """Models that answer with the last message, and call tools as those of two families do."""
    settings = mock_settings(users=4, max_queue=64)
    with (
        in_process_server(settings, echo_llm) as chatglm3,
        in_process_server(settings, tagged_echo_llm) as qwen,
    ):
        yield {CHATGLM3: chatglm3, QWEN: qwen}


@pytest.fixture(scope="module")
def messages(servers: dict[str, InProcessServer]) -> Iterator[dict[str, anthropic.Anthropic]]:
    with (
        anthropic_client(servers[CHATGLM3].url) as chatglm3,
        anthropic_client(servers[QWEN].url) as qwen,
    ):
        yield {CHATGLM3: chatglm3, QWEN: qwen}


@pytest.fixture(scope="module")
def responses(servers: dict[str, InProcessServer]) -> Iterator[dict[str, openai.OpenAI]]:
    with (
        sync_client(servers[CHATGLM3].url) as chatglm3,
        sync_client(servers[QWEN].url) as qwen,
    ):
        yield {CHATGLM3: chatglm3, QWEN: qwen}


def said_in_messages(client: anthropic.Anthropic, says: str, **fields: Any) -> tuple[str, Calls]:
    """Text and calls, the same streamed and not."""
    answer = test_anthropic.both_ways(client, says, tools=test_anthropic.TOOLS, **fields)
    ids = [block.id for block in answer.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert answer.stop_reason == ("tool_use" if ids else "end_turn")
    return text_of_message(answer), calls_of(answer)


def said_in_responses(client: openai.OpenAI, says: str, **fields: Any) -> tuple[str, Calls]:
    """Text and calls, the same streamed and not."""
    answer = test_responses_api.both_ways(client, says, tools=test_responses_api.TOOLS, **fields)
    ids = [item.call_id for item in answer.output if item.type == "function_call"]
    assert len(set(ids)) == len(ids)
    assert answer.status == "completed"
    calls = test_responses_api.calls_of(answer)
    return answer.output_text, [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize(("family", "says", "text"), PARALLEL)
def test_parallel_calls_in_messages(
    messages: dict[str, anthropic.Anthropic], family: str, says: str, text: str
) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": False}
    for fields in ({}, {"tool_choice": choice}):
        assert said_in_messages(messages[family], says, **fields) == (text, BOTH)


@pytest.mark.parametrize(("family", "says", "text"), PARALLEL)
def test_parallel_calls_in_responses(
    responses: dict[str, openai.OpenAI], family: str, says: str, text: str
) -> None:
    for fields in ({}, {"parallel_tool_calls": True}):
        assert said_in_responses(responses[family], says, **fields) == (text, BOTH)


def test_parallel_calls_are_blocks_and_items_of_their_own(
    servers: dict[str, InProcessServer],
) -> None:
    says, url = together(WEATHER, TIME), servers[CHATGLM3].url
    body: Any = {"max_tokens": 2000, "messages": question(says), "tools": test_anthropic.TOOLS}
    blocks = [one for one in named_events(url, MESSAGES, **body) if "index" in one]
    kinds = [one["type"].removeprefix("content_block_") for one in blocks]
    assert kinds == ["start", "delta", "stop"] * 2
    assert [one["index"] for one in blocks] == [0] * 3 + [1] * 3
    written = [one["delta"]["partial_json"] for one in blocks if "delta" in one]
    events = named_events(url, RESPONSES, input=says, tools=test_responses_api.TOOLS)
    items = [one for one in events if "output_index" in one]
    kinds = [one["type"].removeprefix("response.") for one in items]
    delta, done = (f"function_call_arguments.{kind}" for kind in ("delta", "done"))
    assert kinds == ["output_item.added", delta, done, "output_item.done"] * 2
    assert [one["output_index"] for one in items] == [0] * 4 + [1] * 4
    assert [one["delta"] for one in items if "delta" in one] == written
    assert [json.loads(one) for one in written] == [arguments for _, arguments in BOTH]


@pytest.mark.parametrize(("family", "says", "text"), PARALLEL)
def test_an_answer_has_one_call_where_the_client_wants_no_more(
    servers: dict[str, InProcessServer],
    messages: dict[str, anthropic.Anthropic],
    responses: dict[str, openai.OpenAI],
    family: str,
    says: str,
    text: str,
) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert said_in_messages(messages[family], says, tool_choice=choice) == (text, BOTH[:1])
    fields: Any = {"parallel_tool_calls": False}
    assert said_in_responses(responses[family], says, **fields) == (text, BOTH[:1])
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name, _ in BOTH
    ]
    chat = ask_both_ways(servers[family].url, CHAT, messages=question(says), tools=tools, **fields)
    (called,) = chat.choices[0].tool_calls
    assert (chat.choices[0].text, json.loads(called[1])) == (text, BOTH[0][1])


@pytest.mark.parametrize(("family", "says"), NO_CALLS.values(), ids=NO_CALLS)
def test_what_only_looks_like_a_call_is_text(
    messages: dict[str, anthropic.Anthropic],
    responses: dict[str, openai.OpenAI],
    family: str,
    says: str,
) -> None:
    text = says.removeprefix("\n ") if family == CHATGLM3 else says
    assert said_in_messages(messages[family], says) == (text, [])
    assert said_in_responses(responses[family], says) == (text, [])


def test_only_allowed_tools_are_called(
    servers: dict[str, InProcessServer], responses: dict[str, openai.OpenAI]
) -> None:
    """A call of another one is text, and the model does not hear of it."""
    client, url = responses[CHATGLM3], servers[CHATGLM3].url
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    assert said_in_responses(client, WEATHER, tool_choice=allowed) == ("", BOTH[:1])
    assert said_in_responses(client, TIME, tool_choice=allowed) == (TIME, [])
    none: Any = {**allowed, "tools": []}
    assert said_in_responses(client, WEATHER, tool_choice=none) == (WEATHER, [])
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name, _ in BOTH
    ]
    inner = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    body: Any = {"tools": tools, "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}
    chat = ask_both_ways(url, CHAT, messages=question(TIME), **body)
    alone = ask_both_ways(url, CHAT, messages=question(TIME), tools=tools[:1])
    assert (chat.choices[0].text, chat.usage) == (TIME, alone.usage)
    unknown: Any = {**allowed, "tools": [{"type": "function", "name": "get_news"}]}
    with pytest.raises(
        openai.BadRequestError, match="'get_news'; it must be one of tools"
    ) as error:
        said_in_responses(client, "x", tool_choice=unknown)
    assert error.value.param == "tool_choice"
    body = {"input": "x", "tools": test_responses_api.TOOLS}
    body["tool_choice"] = {**none, "mode": "required"}
    with pytest.raises(openai.BadRequestError, match="needs at least 1 tool"):
        client.responses.create(model=MODEL, **body)


def test_text_may_come_behind_the_calls_of_its_turn(responses: dict[str, openai.OpenAI]) -> None:
    asked: Any = question("q")
    text: Any = {"role": "assistant", "content": "wait"}
    called: Any = {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1", "output": message("08:30")}
    body: Any = {"model": MODEL, "tools": test_responses_api.TOOLS}
    answers = [
        responses[CHATGLM3].responses.create(input=[*asked, *turn, result], **body)
        for turn in ([text, called], [called, text])
    ]
    assert [answer.output_text for answer in answers] == ["08:30", "08:30"]
    assert answers[0].usage == answers[1].usage


@pytest.mark.parametrize("status", [{}, {"status": "incomplete"}])
def test_a_call_that_was_cut_off_can_be_sent_back_with_a_result(
    responses: dict[str, openai.OpenAI], status: dict[str, str]
) -> None:
    def after(arguments: str) -> Response:
        called = {"type": "function_call", "call_id": "1", "name": "get_time", **status}
        result = {"type": "function_call_output", "call_id": "1", "output": message("not JSON")}
        turns: Any = [*question("q"), {**called, "arguments": arguments}, result]
        tools: Any = test_responses_api.TOOLS
        return responses[CHATGLM3].responses.create(model=MODEL, input=turns, tools=tools)

    told = after('{"city": "Lon')
    assert told.output_text == "not JSON"
    assert told.usage == after("{}").usage


def test_a_model_without_tools_rejects_calls() -> None:
    asked: Any = question("q")
    called: Any = {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": "{}"}
    use: Any = {"type": "tool_use", "id": "1", "name": "get_time", "input": {}}
    turns: Any = [*asked, {"role": "assistant", "content": [use]}, *asked]
    with in_process_server() as server:
        with (
            sync_client(server.url) as client,
            pytest.raises(openai.BadRequestError, match=r"input\[1\] has a function_call; this"),
        ):
            client.responses.create(model=MODEL, input=[*asked, called])
        with (
            anthropic_client(server.url) as other,
            pytest.raises(anthropic.BadRequestError, match=r"messages\[1\] has a tool_use; this"),
        ):
            other.messages.create(model=MODEL, max_tokens=5, messages=turns)


@pytest.mark.parametrize(("family", "write"), [(CHATGLM3, call), (QWEN, tagged_call)])
def test_a_call_of_a_function_in_a_namespace(
    responses: dict[str, openai.OpenAI], family: str, write: Callable[..., str]
) -> None:
    client = responses[family]
    body: Any = {"model": MODEL, "tools": WITH_NAMESPACE, "user": family}
    asked: Any = question(write("clock__get_time", city="x"))
    first = client.responses.create(input=asked, store=True, **body)
    assert first.to_dict()["tools"][-1] == NAMESPACE
    events = list(client.responses.create(input=asked, stream=True, **body))
    items = [event.item for event in events if hasattr(event, "item")]
    assert len(items) == 2
    for item in (*first.output, *items):
        called = item.to_dict()
        assert (called["namespace"], called["name"]) == ("clock", "get_time")

    (item,) = first.output
    assert item.type == "function_call"
    result = test_responses_api.output_of(item.call_id, message("8:30"))
    sent_back = client.responses.create(input=[*asked, item.to_dict(), result], **body)
    stored = client.responses.create(input=[result], previous_response_id=first.id, **body)
    assert sent_back.output_text.strip() == stored.output_text.strip() == "8:30"
    assert sent_back.usage is not None
    assert stored.usage is not None
    assert sent_back.usage.input_tokens == stored.usage.input_tokens


def test_functions_of_one_name_in_two_namespaces(responses: dict[str, openai.OpenAI]) -> None:
    says = together(TIME, call("clock__get_time", city="x"))
    answer = responses[CHATGLM3].responses.create(model=MODEL, input=says, tools=WITH_NAMESPACE)
    called = [item.to_dict() for item in answer.output]
    assert [one["name"] for one in called] == ["get_time", "get_time"]
    assert [one.get("namespace") for one in called] == [None, "clock"]


def test_the_prompt_has_the_description_of_a_namespace_once(
    responses: dict[str, openai.OpenAI],
) -> None:
    weather, time = test_responses_api.TOOLS
    functions: Any = [
        {**weather, "name": "clock__get_weather", "description": "Tells the time.\n\nd"},
        {**time, "name": "clock__get_time", "description": "d"},
    ]
    create = responses[QWEN].responses.create
    grouped, flat = (
        create(model=MODEL, input="a", tools=tools).usage for tools in ([NAMESPACE], functions)
    )
    assert grouped is not None
    assert grouped == flat
