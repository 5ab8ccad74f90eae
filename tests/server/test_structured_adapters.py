"""Structured output and forced calls in `/v1/messages` and `/v1/responses`, as in the chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from anthropic.types import ToolUseBlock
from openai.types.responses import ResponseFunctionToolCall

from tests.server.anthropic_reading import anthropic_client
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, ask, question, sync_client
from tests.server.test_structured import FORMAT, NAMED, SCHEMA, TOOLS
from tests.structured.random_model import chatglm3_llm

NO_ARGUMENTS = {"type": "object"}
FUNCTIONS = [
    {**tool["function"], "parameters": tool["function"].get("parameters") or NO_ARGUMENTS}
    for tool in TOOLS
]
CUT_INSIDE = 32
"""Tokens, of which the last is one of a call's arguments."""
SAMPLING: Any = {"extra_body": {"temperature": 1.0, "seed": 5}}
ASKED: Any = {"messages": question("q"), "max_tokens": 300, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=4, max_queue=64), chatglm3_llm) as made:
        yield made


@pytest.fixture(scope="module")
def messages(server: InProcessServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def responses(server: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(server.url) as client:
        yield client


def test_json_is_that_of_the_chat(
    server: InProcessServer, messages: anthropic.Anthropic, responses: openai.OpenAI
) -> None:
    text = ask(server.url, CHAT, response_format=FORMAT, **ASKED).choices[0].text
    jsonschema.validate(json.loads(text), SCHEMA)
    response = responses.responses.create(
        model=MODEL,
        input="q",
        max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
        **SAMPLING,
    )
    answer = messages.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "q"}],
        max_tokens=300,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        **SAMPLING,
    )
    (block,) = answer.content
    assert block.type == "text"
    assert response.output_text == block.text == text


@pytest.mark.parametrize("named", [False, True])
def test_forced_calls_are_those_of_the_chat(
    server: InProcessServer,
    messages: anthropic.Anthropic,
    responses: openai.OpenAI,
    named: bool,
) -> None:
    choice = NAMED if named else "required"
    offered = [{"type": "function", "function": function} for function in FUNCTIONS]
    chat = ask(server.url, CHAT, tools=offered, tool_choice=choice, **ASKED).choices[0]
    (call,) = chat.tool_calls
    tools: Any = [{"type": "function", "strict": None, **function} for function in FUNCTIONS]
    flat: Any = {"type": "function", "name": NAMED["function"]["name"]} if named else "required"
    wanted: Any = {"type": "tool", "name": flat["name"]} if named else {"type": "any"}
    body: Any = {"model": MODEL, "input": "q", "max_output_tokens": 300, **SAMPLING}
    events = list(responses.responses.create(tools=tools, tool_choice=flat, stream=True, **body))
    last = events[-1]
    assert last.type == "response.completed"
    (item,) = last.response.output
    assert isinstance(item, ResponseFunctionToolCall)
    assert (item.name, item.arguments) == call
    pieces = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item.arguments
    assert len(pieces) > 1, "they come as they are written"
    with messages.messages.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "q"}],
        max_tokens=300,
        tools=[{"name": one["name"], "input_schema": one["parameters"]} for one in FUNCTIONS],
        tool_choice=wanted,
        **SAMPLING,
    ) as stream:
        written = [one.partial_json for one in stream if one.type == "input_json"]
        answer = stream.get_final_message()
    assert "".join(written) == call[1]
    assert len(written) > 1
    (block,) = answer.content
    assert isinstance(block, ToolUseBlock)
    assert (block.name, block.input) == (call[0], json.loads(call[1]))
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("place", [0, 1])
def test_one_of_the_allowed_tools_is_called(
    server: InProcessServer, responses: openai.OpenAI, place: int
) -> None:
    name = FUNCTIONS[place]["name"]
    offered = [{"type": "function", "function": function} for function in FUNCTIONS]
    inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": inner}
    chat = ask(server.url, CHAT, tools=offered, tool_choice=choice, **ASKED).choices[0]
    (call,) = chat.tool_calls
    assert call[0] == name
    flat = {**inner, "type": "allowed_tools", "tools": [{"type": "function", "name": name}]}
    tools = [{"type": "function", "strict": None, **function} for function in FUNCTIONS]
    body: Any = {"tools": tools, "tool_choice": flat, "max_output_tokens": 300, **SAMPLING}
    response = responses.responses.create(model=MODEL, input="q", **body)
    (item,) = response.output
    assert isinstance(item, ResponseFunctionToolCall)
    assert (item.name, item.arguments) == call


def test_a_call_that_is_cut_off(messages: anthropic.Anthropic, responses: openai.OpenAI) -> None:
    answer = messages.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "q"}],
        max_tokens=8,
        tools=[{"name": "get_weather", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
    )
    assert answer.stop_reason == "max_tokens"
    assert all(block.input == {} for block in answer.content if isinstance(block, ToolUseBlock))
    tool: Any = {"type": "function", "strict": None, "name": "get_weather", "parameters": SCHEMA}
    body: Any = {"tools": [tool], "tool_choice": "required", **SAMPLING}
    response = responses.responses.create(
        model=MODEL, input="q", max_output_tokens=CUT_INSIDE, store=True, user="me", **body
    )
    assert response.status == "incomplete"
    (item,) = response.output
    assert isinstance(item, ResponseFunctionToolCall)
    assert (item.name, item.status) == ("get_weather", "incomplete")
    assert item.arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(item.arguments)
    after = responses.responses.create(
        model=MODEL, input="q", max_output_tokens=1, previous_response_id=response.id, user="me"
    )
    assert after.previous_response_id == response.id
    conversation: Any = [*question("q"), *response.output, *question("q")]
    sent_back = responses.responses.create(model=MODEL, input=conversation, max_output_tokens=1)
    assert sent_back.usage
    assert after.usage
    assert sent_back.usage.input_tokens == after.usage.input_tokens


def test_what_cannot_be_served_is_named(
    messages: anthropic.Anthropic, responses: openai.OpenAI
) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as error:
        responses.responses.create(model=MODEL, input="q", text=text)
    assert error.value.param == "text.format"
    with pytest.raises(openai.BadRequestError) as error:
        responses.responses.create(model=MODEL, input="q", tool_choice="required")
    assert error.value.param == "tool_choice"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice forces a call; it needs"):
        messages.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": "q"}],
            max_tokens=8,
            tool_choice={"type": "any"},
        )
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        messages.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": "q"}],
            max_tokens=8,
            output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
        )


def test_a_schema_of_a_json_object_is_enforced(responses: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_object", "schema": {"type": "boolean"}}}
    response = responses.responses.create(model=MODEL, input="q", text=text, **SAMPLING)
    assert response.output_text in ("true", "false")


@pytest.mark.parametrize(
    "wanted",
    [{"type": "text", "schema": {"type": "boolean"}}, {"type": "json_schema", "name": "x"}],
)
def test_a_response_has_a_schema_where_its_type_has_one(
    responses: openai.OpenAI, wanted: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"text\.format: schema is required") as error:
        responses.responses.create(model=MODEL, input="q", text={"format": wanted})
    assert error.value.param == "text.format"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({}, "type: Field required"),
        ({"type": "json_schema"}, "schema: Field required"),
        ({"type": "json_schema", "schema": {"type": "boolean"}, "foo": 1}, "foo: unknown field"),
        *(
            (
                {"type": kind, "schema": {"type": "boolean"}},
                f"type: Input should be 'json_schema', not '{kind}'",
            )
            for kind in ("text", "json_object", "regex")
        ),
    ],
)
def test_the_format_of_a_message_has_a_schema(
    messages: anthropic.Anthropic, wanted: Any, problem: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        messages.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": "q"}],
            max_tokens=8,
            output_config={"format": wanted},
        )
    assert f"output_config.format.{problem}" in error.value.message


@pytest.mark.parametrize("name", ["user", "messages", "stop", "logprobs", "response_format"])
def test_words_of_the_client_stay_in_errors(
    messages: anthropic.Anthropic, responses: openai.OpenAI, name: str
) -> None:
    """Also those that are names of a chat's fields."""
    impossible: Any = {"type": "object", "properties": {name: False}, "required": [name]}
    asked: Any = [{"role": "user", "content": "q"}]
    tools: Any = [{"name": "f", "input_schema": impossible}]
    body: Any = {"messages": asked, "max_tokens": 8}
    with pytest.raises(anthropic.BadRequestError, match=f"required property '{name}'"):
        messages.messages.create(model=MODEL, tools=tools, tool_choice={"type": "any"}, **body)
    with pytest.raises(anthropic.NotFoundError, match=f"model '{name}' is unknown"):
        messages.messages.create(model=name, **body)
    tools = [{"type": "function", "strict": None, "name": "f", "parameters": impossible}]
    with pytest.raises(openai.BadRequestError, match=f"required property '{name}'"):
        responses.responses.create(model=MODEL, input="q", tools=tools, tool_choice="required")
