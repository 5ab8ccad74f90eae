"""Tools in `/v1/chat/completions`: whole and streamed calls, held-back text, and results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm_multiuser.tokenizers.headers import SEPARATOR
from tests.server.echoing import END, EchoTokenizer, call, echo_llm, message, together
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    Answer,
    Choice,
    ask,
    ask_both_ways,
    async_client,
    question,
    stream_chunks,
    sync_client,
)


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: list[Any] = [tool("get_weather"), tool("get_time")]
CALL = call("get_weather", city="北京")
ARGUMENTS = '{"city": "北京"}'


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=4, max_queue=64), echo_llm) as server:
        yield server


@pytest.fixture
def echo_client(echo: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(echo.url) as client:
        yield client


def answer(server: InProcessServer, says: str, **body: Any) -> Choice:
    """The answer of a model that says this, the same streamed and not."""
    messages = question(says)
    return ask_both_ways(server.url, CHAT, messages=messages, **{"tools": TOOLS, **body}).choices[0]


@pytest.mark.parametrize(
    ("says", "content", "calls"),
    [
        (message("你好"), "你好", []),
        (CALL, "", [("get_weather", ARGUMENTS)]),
        (together(message("wait"), CALL), "wait", [("get_weather", ARGUMENTS)]),
        (
            together(CALL, call("get_time", city="x", n=1)),
            "",
            [("get_weather", ARGUMENTS), ("get_time", '{"city": "x", "n": 1}')],
        ),
        (call("other", city="x"), call("other", city="x"), []),
        (CALL[:-4], CALL[:-4], []),
        ("get_weather", "get_weather", []),
    ],
)
def test_content_and_calls(
    echo: InProcessServer, says: str, content: str, calls: list[tuple[str, str]]
) -> None:
    choice = answer(echo, says)
    assert (choice.text, choice.tool_calls) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")


def test_without_tools_a_call_is_text(echo: InProcessServer) -> None:
    without: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for fields in without:
        choice = answer(echo, CALL, **fields)
        assert (choice.text, choice.tool_calls, choice.finish_reason) == (CALL, [], "stop")
    assert answer(echo, CALL, tool_choice="auto", parallel_tool_calls=False).tool_calls


def test_the_model_hears_of_its_tools_unless_it_must_not_call(echo: InProcessServer) -> None:
    def tokens(**fields: Any) -> int:
        usage = ask(echo.url, CHAT, messages=question("x"), **fields).usage
        assert usage is not None
        return int(usage["prompt_tokens"])

    assert tokens(tools=TOOLS) > tokens(tools=TOOLS[:1]) > tokens()
    assert tokens(tools=TOOLS, tool_choice="none") == tokens(tools=[]) == tokens()


def test_only_what_could_be_a_call_is_held_back(echo: InProcessServer) -> None:
    def deltas(says: str) -> list[str]:
        chunks = stream_chunks(echo.url, CHAT, messages=question(says), tools=TOOLS)
        return [chunk["choices"][0]["delta"].get("content") for chunk in chunks]

    assert deltas("\nget") == ["", "g", "e", "t", None]
    assert deltas("get xy") == ["", "get x", "y", None]
    assert deltas(CALL) == ["", None, None]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["\n", " ", SEPARATOR, SEPARATOR[:6], CALL, CALL[:20], "get_time\n"]),
            st.text(st.characters(codec="utf-8"), max_size=6),
        ),
        max_size=6,
    )
)
@example(["get_weather\n", CALL])
def test_deltas_join_to_what_the_reader_makes_of_the_whole(
    echo: InProcessServer, parts: list[str]
) -> None:
    says = "".join(parts)
    choice = answer(echo, says)
    reader = EchoTokenizer().answer_reader(TOOLS)
    content = reader.feed(says)
    end = reader.finish()
    assert choice.text == content + end.text
    assert choice.tool_calls == [(one.name, one.arguments) for one in end.tool_calls]


def test_every_choice_has_a_reader_of_its_own(echo: InProcessServer) -> None:
    body: dict[str, Any] = {"messages": question(together(message("a"), CALL)), "tools": TOOLS}
    choices = ask_both_ways(echo.url, CHAT, n=3, **body).choices
    assert [choices[number] for number in range(3)] == [
        answer(echo, body["messages"][0]["content"])
    ] * 3


def test_stop_strings_are_looked_for_in_the_content_only(echo: InProcessServer) -> None:
    choice = answer(echo, message("one\ntwo"), stop="\n")
    assert (choice.text, choice.finish_reason) == ("one", "stop")
    choice = answer(echo, together(message("a"), CALL), stop=["北京", "`", "tool"])
    assert (choice.text, choice.finish_reason) == ("a", "tool_calls")
    choice = answer(echo, together(CALL, message("a stop b")), stop="stop")
    assert (choice.text, choice.finish_reason) == ("a ", "tool_calls")
    assert choice.tool_calls == [("get_weather", ARGUMENTS)]
    choice = answer(echo, call("other", city="x"), stop="city")
    assert choice.text == call("other", city="x").partition("city")[0]


def test_logprobs_and_token_ids_are_those_of_all_tokens(echo: InProcessServer) -> None:
    says = together(message("a"), CALL)
    choice = answer(echo, says, logprobs=True, return_token_ids=True)
    assert choice.token_ids == [*EchoTokenizer().encode(says), END]
    written = [entry["bytes"] for entry in choice.logprobs["content"]]
    assert b"".join(map(bytes, written)) == says.lstrip().encode()


def test_an_answer_that_is_cut_in_a_call_is_text(echo: InProcessServer) -> None:
    choice = answer(echo, CALL, max_tokens=20)
    assert (choice.text, choice.finish_reason) == (CALL[:20], "length")
    choice = answer(echo, together(CALL, CALL), max_tokens=len(CALL.encode()) + 20)
    assert (choice.tool_calls, choice.finish_reason) == ([("get_weather", ARGUMENTS)], "length")


def test_a_round_trip_with_the_official_client(echo_client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "tools": TOOLS}
    messages: list[Any] = question(together(call("get_time"), CALL))
    said = echo_client.chat.completions.create(messages=messages, **body).choices[0]
    assert said.finish_reason == "tool_calls"
    assert said.message.content is None
    calls: list[Any] = said.message.tool_calls or []
    assert [one.function.name for one in calls] == ["get_time", "get_weather"]
    assert json.loads(calls[1].function.arguments) == {"city": "北京"}
    # Results may come in any order; the model gets them in that of the calls.
    results: list[Any] = [
        {"role": "tool", "tool_call_id": one.id, "content": message(f"of {one.function.name}")}
        for one in reversed(calls)
    ]
    for told in (results, results[::-1]):
        final = echo_client.chat.completions.create(
            messages=[*messages, said.message, *told], **body
        ).choices[0]
        assert (final.message.content, final.finish_reason) == ("of get_weather", "stop")
        assert final.message.tool_calls is None
    # What was said before can be told without tools, too.
    told = [*messages, said.message, *results, {"role": "assistant", "content": "so"}]
    final = echo_client.chat.completions.create(
        messages=[*told, *question(message("bye"))], model=MODEL
    ).choices[0]
    assert final.message.content == "bye"


def test_only_the_first_call_without_parallel_calls(echo: InProcessServer) -> None:
    says = together(message("a"), CALL, call("get_time", n=1))
    for parallel, calls in ((None, 2), (True, 2), (False, 1)):
        choice = answer(echo, says, parallel_tool_calls=parallel)
        assert (choice.text, len(choice.tool_calls)) == ("a", calls)
        assert choice.tool_calls[0] == ("get_weather", ARGUMENTS)
        assert choice.finish_reason == "tool_calls"
    several = {"messages": question(says), "tools": TOOLS, "n": 2, "parallel_tool_calls": False}
    choices = ask_both_ways(echo.url, CHAT, **several).choices
    assert [len(choices[number].tool_calls) for number in range(2)] == [1, 1]


def test_the_model_hears_of_allowed_tools_only(echo: InProcessServer) -> None:
    def allowed(*names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}

    other = call("get_time", n=1)
    assert answer(echo, CALL, tool_choice=allowed("get_weather")).tool_calls
    assert answer(echo, other, tool_choice=allowed("get_weather")).text == other
    assert answer(echo, other, tool_choice=allowed("get_weather", "get_time")).tool_calls
    assert answer(echo, CALL, tool_choice=allowed()).text == CALL
    body: dict[str, Any] = {"messages": question("x"), "tools": TOOLS}
    one = ask(echo.url, CHAT, **body, tool_choice=allowed("get_weather")).usage
    assert one == ask(echo.url, CHAT, **{**body, "tools": TOOLS[:1]}).usage
    for wrong, said in (
        (allowed("get_news"), "'get_news'; it must be one of tools: get_weather, get_time"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools: Field required"),
        ({"type": "custom"}, "of type function or allowed_tools, not 'custom'"),
        ("any", "'none', 'auto' or 'required', not 'any'"),
    ):
        response = httpx.post(echo.url + CHAT, json={**body, "tool_choice": wrong}, **OPTIONS)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


def test_markers_of_a_cache_are_not_in_the_prompt(echo: InProcessServer) -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    outside = {**TOOLS[0], **marker}
    inside = {**TOOLS[1], "function": {**TOOLS[1]["function"], **marker}}
    marked = ask_both_ways(echo.url, CHAT, messages=question(CALL), tools=[outside, inside])
    assert marked.choices[0].tool_calls == [("get_weather", ARGUMENTS)]
    assert marked.usage == ask_both_ways(echo.url, CHAT, messages=question(CALL), tools=TOOLS).usage


@pytest.mark.parametrize("arguments", ['{"city": "Lon', "[]", '{"a": NaN}', "[" * 100_000])
def test_a_call_without_readable_arguments_can_be_sent_back(
    echo: InProcessServer, arguments: str
) -> None:
    def after(arguments: str) -> Answer:
        called = {"id": "1", "function": {"name": "get_weather", "arguments": arguments}}
        messages = [
            *question("x"),
            {"role": "assistant", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": message("not JSON")},
        ]
        return ask_both_ways(echo.url, CHAT, messages=messages, tools=TOOLS)

    told = after(arguments)
    assert told.choices[0].text == "not JSON"
    assert told.usage == after("{}").usage


@pytest.mark.parametrize("call_ids", [["nobody's"], ["1", "1"], ["1", "2", "3"]])
def test_a_result_needs_a_call(echo: InProcessServer, call_ids: list[str]) -> None:
    calls = [
        {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for one in ("1", "2")
    ]
    messages = [
        *question("x"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one, "content": "x"} for one in call_ids),
    ]
    response = httpx.post(echo.url + CHAT, json={"messages": messages}, **OPTIONS)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert f"messages[{1 + len(call_ids)}] has tool_call_id {call_ids[-1]!r}" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]}, "messages"),
        ({"tools": [tool(" ")]}, "tools"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ],
)
def test_what_cannot_be_is_named(echo: InProcessServer, fields: Any, param: str) -> None:
    for stream in (False, True):
        body = {"messages": question("x"), "stream": stream, **fields}
        response = httpx.post(echo.url + CHAT, json=body, **OPTIONS)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_the_async_client_with_many_streams_at_once(echo: InProcessServer) -> None:
    async def run() -> None:
        async with async_client(echo.url) as client:

            async def called(number: int) -> Any:
                messages = question(call("get_time", n=number))
                stream: Any = await client.chat.completions.create(
                    model=MODEL, messages=messages, tools=TOOLS, stream=True
                )
                deltas = [chunk.choices[0].delta async for chunk in stream]
                (only,) = [one for delta in deltas for one in delta.tool_calls or ()]
                return json.loads(only.function.arguments)

            numbers = range(12)
            assert await asyncio.gather(*map(called, numbers)) == [{"n": one} for one in numbers]

    asyncio.run(run())


def test_token_ids_are_answered_with_the_models_own_words(echo: InProcessServer) -> None:
    ids = EchoTokenizer().encode_prompt(message("hi"))
    assert ask_both_ways(echo.url, COMPLETIONS, prompt=ids).choices[0].text == message("hi")
    assert ask_both_ways(echo.url, COMPLETIONS, prompt=message("hi")).choices[0].text == "hi"
