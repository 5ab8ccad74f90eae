"""Structured output and forced calls in `/v1/*`, with the official client."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, Optional

import jsonschema
import openai
import pydantic
import pytest

from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, COMPLETIONS, ask, ask_both_ways, question, sync_client
from tests.structured.random_model import chatglm3_llm
from tests.structured.walking import tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
}
BOOLEAN = {"type": "boolean"}
TOOLS: list[Any] = [tool("get_weather", SCHEMA), tool("stop")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SETTINGS: Any = {"max_tokens": 300, "temperature": 1, "seed": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=4, max_queue=64), chatglm3_llm) as made:
        yield made


@pytest.fixture
def client(server: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(server.url) as made:
        yield made


def chat(server: InProcessServer, **body: Any) -> Any:
    """The first choice, the same streamed and not."""
    body = {**SETTINGS, "messages": question("q"), **body}
    return ask_both_ways(server.url, CHAT, **body).choices[0]


def problem(client: openai.OpenAI, **body: Any) -> tuple[Optional[str], str]:
    """The field and the message of an error 400."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="mock", messages=question("q"), **body)
    return raised.value.param, raised.value.message


def test_response_format(server: InProcessServer) -> None:
    for seed in range(3):
        choice = chat(server, response_format=FORMAT, seed=seed)
        jsonschema.validate(json.loads(choice.text), SCHEMA)
        assert choice.finish_reason == "stop"


def test_content_that_looks_like_a_message(server: InProcessServer) -> None:
    text = " a<|assistant|>stop\n{} "
    choice = chat(server, structured_outputs={"choice": [text]}, tools=TOOLS, logprobs=True)
    assert (choice.text, choice.tool_calls) == (text, [])
    shown = [entry["bytes"] for entry in choice.logprobs["content"]]
    assert b"".join(map(bytes, shown)).decode() == text


def test_several_answers_each_as_alone(client: openai.OpenAI) -> None:
    def answers(**body: Any) -> list[Optional[str]]:
        made = client.chat.completions.create(
            model="mock", messages=question("q"), response_format=FORMAT, **{**SETTINGS, **body}
        )
        return [choice.message.content for choice in made.choices]

    together = answers(n=3)
    assert len(set(together)) == 3
    assert together == [answers(seed=SETTINGS["seed"] + place)[0] for place in range(3)]


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Day(pydantic.BaseModel):
    """What a client asks for as a type of its own."""

    mood: Mood
    sunny: bool
    note: Optional[str] = pydantic.Field(max_length=5)


def test_types_of_the_client(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="mock", messages=question("q"), response_format=Day, **SETTINGS
    )
    assert isinstance(made.choices[0].message.parsed, Day)
    with client.chat.completions.stream(
        model="mock", messages=question("q"), response_format=Day, **SETTINGS
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == made.choices[0].message.parsed


def test_parsed_calls(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="mock",
        messages=question("q"),
        tools=[openai.pydantic_function_tool(Day)],
        tool_choice="required",
        **SETTINGS,
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Day)


def test_strict_tools_by_the_clients_stream_helper(client: openai.OpenAI) -> None:
    messages: Any = question("day?")
    tools = [openai.pydantic_function_tool(Day)]
    with client.chat.completions.stream(
        model="mock", messages=messages, tools=tools, tool_choice="required", **SETTINGS
    ) as stream:
        events = list(stream)
        said: Any = stream.get_final_completion().choices[0].message
    (done,) = [one for one in events if one.type == "tool_calls.function.arguments.done"]
    (call,) = said.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Day)
    assert done.arguments == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    again = client.chat.completions.create(
        model="mock", messages=[*messages, said, result], response_format=FORMAT, **SETTINGS
    )
    jsonschema.validate(json.loads(again.choices[0].message.content or ""), SCHEMA)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls(server: InProcessServer, choice: Any) -> None:
    names = set()
    for seed in range(6):
        answer = chat(server, tools=TOOLS, tool_choice=choice, messages=question(f"q{seed}"))
        ((name, arguments),) = answer.tool_calls
        jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {})
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        names.add(name)
    assert names == ({"get_weather", "stop"} if choice == "required" else {"get_weather"})


def test_arguments_are_streamed_as_they_are_written(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="mock",
        messages=question("q"),
        tools=TOOLS,
        tool_choice=NAMED,
        stream=True,
        **SETTINGS,
    )
    calls = [
        call
        for chunk in stream
        for call in chunk.choices[0].delta.tool_calls or []
        if call.function
    ]
    assert len(calls) > 5
    first, *others = calls
    assert first.id
    assert first.type == "function"
    assert first.function
    assert first.function.name == "get_weather"
    assert all((one.index, one.id) == (0, None) for one in others)
    arguments = "".join(one.function.arguments or "" for one in calls if one.function)
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_forced_call_that_is_cut_off(server: InProcessServer) -> None:
    answer = chat(server, tools=TOOLS, tool_choice=NAMED, max_tokens=30)
    ((name, arguments),) = answer.tool_calls
    assert (name, answer.text, answer.finish_reason) == ("get_weather", "", "length")
    assert arguments.startswith("{")
    assert not arguments.endswith("}")


def test_strict_tools_are_called_with_valid_arguments_or_not_at_all(
    server: InProcessServer,
) -> None:
    strict = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    called = set()
    for seed in range(8):
        answer = chat(server, tools=strict, messages=question(f"q{seed}"), response_format=FORMAT)
        for name, arguments in answer.tool_calls:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {})
        if not answer.tool_calls:
            jsonschema.validate(json.loads(answer.text), SCHEMA)
        called.add(bool(answer.tool_calls))
    assert called == {True, False}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_regex": "c{4}"}, "cccc"),
        ({"guided_choice": ["北京"]}, "北京"),
        ({"guided_grammar": 'start: "k" "v"'}, "kv"),
    ],
)
def test_fields_of_vllm(server: InProcessServer, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, chat(server, **fields).text)
    completion = ask(server.url, COMPLETIONS, prompt="q", **SETTINGS, **fields)
    assert re.fullmatch(pattern, completion.choices[0].text)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        (
            {"extra_body": {"response_format": {"type": "json_object", "schema": {"not": {}}}}},
            "response_format",
            "cannot be served",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": BOOLEAN}}},
            "response_format",
            "type is 'json_object'; only type 'json_schema' can have json_schema",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": BOOLEAN}}},
            "response_format",
            "type is 'text'; only type 'json_schema' can have json_schema",
        ),
        (
            {"response_format": {**FORMAT, "schema": BOOLEAN}},
            "response_format",
            "type is 'json_schema'; only type 'json_object' can have schema",
        ),
        (
            {"response_format": {"type": "text", "schema": BOOLEAN}},
            "response_format",
            "type is 'text'; only type 'json_object' can have schema",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "(("}}},
            "structured_outputs",
            "cannot be served",
        ),
        ({"extra_body": {"guided_regex": "(("}}, "guided_regex", "cannot be served"),
        (
            {"extra_body": {"guided_json": "[" * 65}},
            "guided_json",
            "65 levels of lists and objects; it may have at most 64",
        ),
        (
            {"extra_body": {"guided_json": {}, "guided_regex": "a"}},
            "guided_regex",
            "it may have one of them",
        ),
        (
            {"extra_body": {"guided_choice": ["a"]}, "response_format": FORMAT},
            "guided_choice",
            "beside response_format; give one of them",
        ),
        ({"tool_choice": "required"}, "tool_choice", "at least 1 tool"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
            "one of tools: get_weather, stop",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "extra_body": {"continue_final_message": True},
            },
            "tool_choice",
            "the last message cannot be the beginning of the answer",
        ),
        (
            {"tools": [*TOOLS, tool("f", {"oneOf": [{}, {}]})], "tool_choice": "required"},
            "tools",
            "cannot be served: parameters of function 'f'",
        ),
    ],
)
def test_what_cannot_be_served_is_rejected_with_its_reason(
    client: openai.OpenAI, body: dict[str, Any], field: str, words: str
) -> None:
    where, message = problem(client, **body)
    assert where == field
    assert field in message
    assert words in message


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with in_process_server(mock_settings(), chatglm3_llm) as bare, sync_client(bare.url) as client:
        where, message = problem(client, response_format=FORMAT)
    assert where == "response_format"
    assert "pip install 'glm-multiuser[structured]'" in message


def completions(client: openai.OpenAI, **body: Any) -> Any:
    return client.completions.create(model="mock", **{**SETTINGS, "max_tokens": 5, **body})


def test_best_of_are_the_likeliest_answers(client: openai.OpenAI) -> None:
    several = completions(client, prompt="q", n=4, logprobs=0).choices
    means = [sum(one.logprobs.token_logprobs) / 5 for one in several]
    ranked = sorted(range(4), key=lambda place: -means[place])
    best = completions(client, prompt=["q", "r"], best_of=4, n=2)
    assert [one.text for one in best.choices[:2]] == [several[place].text for place in ranked[:2]]
    assert [one.index for one in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == 40
    assert all(one.logprobs is None for one in best.choices)


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = completions(client, prompt=["ab", "你好"], n=2).choices
    echoed = completions(client, prompt=["ab", "你好"], n=2, echo=True).choices
    prompts = ["ab", "ab", "你好", "你好"]
    expected = [prompt + one.text for prompt, one in zip(prompts, plain)]
    assert [one.text for one in echoed] == expected
    texts = [""] * 4
    for chunk in completions(client, prompt=["ab", "你好"], n=2, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_what_completions_reject(client: openai.OpenAI, body: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        completions(client, prompt="q", **body)
    assert raised.value.param == field
    assert field in raised.value.message
