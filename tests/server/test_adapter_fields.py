"""Fields that agents send to `/v1/responses` and `/v1/messages`: hints are accepted without effect.

Hints of a wrong type are rejected, and so are fields whose effect a client would miss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic
import openai
import pytest
from anthropic.types import message_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from glm_multiuser.server.anthropic import requests as messages_requests
from glm_multiuser.server.anthropic.requests import MessagesRequest
from glm_multiuser.server.responses_api import items as responses_items
from glm_multiuser.server.responses_api import requests as responses_requests
from glm_multiuser.server.responses_api.requests import ResponseRequest
from tests.server.anthropic_reading import anthropic_client, text_of
from tests.server.echoing import echo_llm, message
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import sync_client
from tests.server.process import ROOT

HELLO = message("hello")
IMAGE = "data:image/png;base64,iVBORw0KGgo="
PICTURE = [{"type": "input_image", "image_url": IMAGE}]
DOCUMENTED = (ROOT / "docs/responses_and_messages.md").read_text("utf-8")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def ids(value: Any) -> str:
    return str(value)[:60]


@pytest.fixture(scope="module")
def echo() -> Iterator[InProcessServer]:
    """A model that answers with the last message."""
    with in_process_server(mock_settings(users=4, max_queue=64), echo_llm) as server:
        yield server


@pytest.fixture(scope="module")
def responses(echo: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(echo.url) as client:
        yield client


@pytest.fixture(scope="module")
def messages(echo: InProcessServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(echo.url) as client:
        yield client


def function(**fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "name": "f", "strict": None, "parameters": parameters, **fields}


def tool(**fields: Any) -> dict[str, Any]:
    return {"name": "f", "input_schema": {"type": "object"}, **fields}


def after(item: dict[str, Any]) -> dict[str, Any]:
    """An input that has this item in it."""
    question = {"role": "user", "content": HELLO}
    return {"input": [{"role": "user", "content": "a"}, item, question]}


RESPONSES_HINTS: list[dict[str, Any]] = [
    *({"reasoning": {"effort": effort, "summary": "auto"}} for effort in EFFORTS),
    {"reasoning": {"effort": None, "summary": "detailed", "generate_summary": "concise"}},
    {"reasoning": {"context": "all_turns", "mode": "pro"}},
    *({"text": {"verbosity": verbosity}} for verbosity in ("low", "medium", "high")),
    {"text": {"verbosity": "low", "format": {"type": "text"}}},
    {"truncation": "disabled"},
    {"metadata": {"task": "1"}},
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"prompt_cache_key": "0198c3", "prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m", "prewarm": False}},
    *({"service_tier": tier} for tier in ("auto", "default", "flex", "priority")),
    {"safety_identifier": "user-1"},
    {"store": False, "background": False, "max_tool_calls": 3},
    {"stream_options": {"include_obfuscation": False}},
    {"tools": [function(allowed_callers=["direct"], defer_loading=False, output_schema={})]},
    {"tools": [function()], "tool_choice": "auto", "parallel_tool_calls": False},
    {"access_programs": {"cyber": "standard"}, "image": {"context_compression": "auto"}},
    {"client_metadata": {"x-codex-installation-id": "0"}},
    after({"type": "reasoning", "id": "rs_1", "summary": []}),
    after(
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": None,
            "encrypted_content": "gAAAA",
        }
    ),
]


@pytest.mark.parametrize("fields", RESPONSES_HINTS, ids=ids)
def test_hints_change_no_response(responses: openai.OpenAI, fields: dict[str, Any]) -> None:
    # In `extra_body`, because older clients do not know all of them.
    answer = responses.responses.create(model=MODEL, input=HELLO, extra_body=fields)
    assert (answer.output_text, answer.status) == ("hello", "completed")
    *_, last = responses.responses.create(model=MODEL, input=HELLO, stream=True, extra_body=fields)
    assert last.type == "response.completed"
    assert last.response.output_text == "hello"
    assert last.response.usage == answer.usage


def test_a_response_does_not_pretend_that_hints_had_an_effect(responses: openai.OpenAI) -> None:
    answer = responses.responses.create(
        model=MODEL,
        input=HELLO,
        reasoning={"effort": "high", "summary": "auto"},
        text={"verbosity": "low"},
        service_tier="priority",
    )
    assert answer.reasoning is not None
    assert (answer.reasoning.effort, answer.reasoning.summary) == (None, None)
    assert answer.text is not None
    assert (answer.text.verbosity, answer.service_tier) == (None, None)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


MESSAGES_HINTS: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "enabled", "budget_tokens": 31999, "display": "summarized"}},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    *({"output_config": {"effort": effort}} for effort in ("low", "medium", "high", "max", None)),
    {"output_config": {"task_budget": {"type": "tokens", "total": 20000}}},
    {"context_management": {"edits": []}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"betas": ["interleaved-thinking-2025-05-14", "claude-code-20250219"]},
    {"extra_body": {"betas": ["context-management-2025-06-27"]}},
    {"extra_headers": {"anthropic-beta": "fine-grained-tool-streaming-2025-05-14,x-2030-01-01"}},
    {"extra_headers": {"anthropic-version": "2030-01-01"}},
    {"metadata": {"user_id": f"user_{'0' * 64}_account__session_{'0' * 36}"}},
    {"metadata": {"user_id": '{"device_id":"00","account_uuid":"","session_id":"00"}'}},
    {"service_tier": "auto", "inference_geo": "us", "speed": "fast"},
    {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
    {"diagnostics": {"previous_message_id": None}},
    {"system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]},
    {"tools": [tool(type="custom", cache_control={"type": "ephemeral"}, strict=False)]},
    {"tools": [tool(eager_input_streaming=True, input_examples=[{}], defer_loading=True)]},
    {"tools": [tool()], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
]


@pytest.mark.parametrize("fields", MESSAGES_HINTS, ids=ids)
def test_hints_change_no_message(messages: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    """Asked as the beta client does, which has more fields, and a query in its URL."""
    asked = [{"role": "user", "content": HELLO}]
    body: Any = {"model": MODEL, "max_tokens": 100, "messages": asked, **fields}
    answer = messages.beta.messages.create(**body)
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason) == ("hello", "end_turn")
    with messages.beta.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert [one.to_dict() for one in streamed.content] == [block.to_dict()]
    for name in ("max_tokens", "metadata", "service_tier", "inference_geo", "diagnostics"):
        body.pop(name, None)
    assert messages.beta.messages.count_tokens(**body).input_tokens > 0


def test_results_of_tools_with_blocks_and_errors(messages: anthropic.Anthropic) -> None:
    cached = {"type": "ephemeral"}
    texts = [{"type": "text", "text": "\n no such "}, {"type": "text", "text": "file"}]
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": texts}
    asked: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {}, "cache_control": cached},
            ],
        },
        {"role": "user", "content": [{**result, "cache_control": cached}]},
    ]
    tools: Any = [tool()]
    answer = messages.messages.create(model=MODEL, max_tokens=99, messages=asked, tools=tools)
    assert text_of(answer) == "no such file"


RESPONSES_REFUSED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    # What was sent, and what is possible.
    ({"truncation": "auto"}, "truncation", ("'auto'", '"disabled"', "rejected")),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", ("'web_search'", '"function"')),
    ({"tools": [{"type": "local_shell"}]}, "tools.0.type", ("'local_shell'", '"function"')),
    (
        {"tools": [function(), {"type": "custom", "name": "apply_patch"}]},
        "tools.1.type",
        ("'custom'", '"function"'),
    ),
    (
        {
            "tools": [
                function(),
                {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]},
            ]
        },
        "tools.1.tools.0.type",
        ("'custom'", '"function"'),
    ),
    (
        {"tool_choice": {"type": "web_search_preview"}},
        "tool_choice",
        ("'web_search_preview'", "allowed_tools"),
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
        "tool_choice.mode",
        ("'none'", "'auto' or 'required'"),
    ),
    ({"tool_choice": "any"}, "tool_choice", ("tool_choice: ", "not 'any'")),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.name",
        ("Field required",),
    ),
    (
        {"tool_choice": {"type": "function", "name": "f", "type[x]": 1}},
        "tool_choice.type[x]",
        ("unknown field",),
    ),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", ("not 'tool'",)),
    (
        after({"type": "item_reference", "id": "msg_1"}),
        "input.1",
        ("'item_reference'", "message", "whole if store is false"),
    ),
    (after({"type": "web_search_call"}), "input.1", ("'web_search_call'", "function_call")),
    (
        {"input": [{"role": "user", "content": PICTURE}]},
        "input.0.content.0.type",
        ("'input_image'", "'input_text'"),
    ),
    (
        after(
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}
        ),
        "input.1.output.0.type",
        ("'input_image'", "'input_text'"),
    ),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", ("True",)),
    ({"background": True}, "background", ("True", "not implemented")),
    ({"context_management": [{"type": "compaction"}]}, "context_management", ("compaction", "[]")),
    ({"extra_body": {"client_meta": {}}}, "client_meta", ("unknown field",)),
    # Hints of another type.
    ({"reasoning": "high"}, "reasoning", ("'high'",)),
    ({"reasoning": {"effort": 3}}, "reasoning.effort", ("string", "3")),
    ({"reasoning": {"summary": True}}, "reasoning.summary", ("string", "True")),
    ({"text": {"verbosity": 1}}, "text.verbosity", ("string", "1")),
    ({"metadata": {"a": 1}}, "metadata.a", ("string", "1")),
    ({"extra_body": {"client_metadata": {"a": 1}}}, "client_metadata.a", ("string", "1")),
    ({"extra_body": {"client_metadata": "a"}}, "client_metadata", ("dictionary", "'a'")),
    ({"include": "reasoning.encrypted_content"}, "include", ("list",)),
    ({"prompt_cache_key": 1}, "prompt_cache_key", ("string", "1")),
    ({"service_tier": 1}, "service_tier", ("string", "1")),
    ({"safety_identifier": ["a"]}, "safety_identifier", ("string", "['a']")),
    ({"max_tool_calls": "3"}, "max_tool_calls", ("integer", "'3'")),
    ({"stream_options": []}, "stream_options", ("dictionary", "[]")),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", ("boolean", "'no'")),
    ({"tools": [function(defer_loading=1)]}, "tools.0.defer_loading", ("boolean", "1")),
    (
        after({"type": "reasoning", "summary": "hm"}),
        "input.1.summary",
        ("list", "'hm'"),
    ),
]


@pytest.mark.parametrize(("fields", "field", "said"), RESPONSES_REFUSED, ids=ids)
def test_what_a_response_cannot_have_is_refused(
    responses: openai.OpenAI, fields: dict[str, Any], field: str, said: tuple[str, ...]
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            responses.responses.create(**{"model": MODEL, "input": "x", "stream": stream, **fields})
        assert error.value.param == field
        message = error.value.response.json()["error"]["message"]
        assert field in message
        assert all(part in message for part in said), message


def block(one: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [one]}]}


IMAGE_BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
MESSAGES_REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (block(IMAGE_BLOCK), ("messages.0.content.0: ", "no images", "not 'image'")),
    (
        block({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE_BLOCK]}),
        ("messages.0.content.0.content.0.type: ", "'text'", "not 'image'"),
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        ("tools.0.type: ", "runs no tools", "not 'web_search_20250305'"),
    ),
    (
        {"tools": [tool(), {"type": "bash_20250124", "name": "bash"}]},
        ("tools.1.type: ", '"custom"', "not 'bash_20250124'"),
    ),
    (
        block({"type": "tool_result", "content": "x"}),
        ("messages.0.content.0.tool_use_id: Field required",),
    ),
    (block({"type": "text", "text": 1}), ("messages.0.content.0.text: ", "not 1")),
    ({"tools": [{"name": "f"}]}, ("tools.0.input_schema: Field required",)),
    (
        {"mcp_servers": [{"type": "url", "url": "https://mcp.example", "name": "m"}]},
        ("mcp_servers: ", "runs no tools"),
    ),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        ("context_management.edits.0.type: ", "not 'clear_tool_uses_20250919'", "rejected"),
    ),
    ({"context_management": {"enabled": True}}, ("context_management.enabled: unknown field",)),
    ({"thinking": {"type": "always"}}, ("thinking.type: ", "'enabled'", "not 'always'")),
    # Hints of another type.
    ({"thinking": True}, ("thinking: ", "True")),
    (
        {"thinking": {"type": "enabled", "budget_tokens": "x"}},
        ("thinking.budget_tokens: ", "integer", "'x'"),
    ),
    ({"output_config": {"effort": 1}}, ("output_config.effort: ", "string", "1")),
    ({"context_management": []}, ("context_management: ", "[]")),
    ({"extra_body": {"betas": "x"}}, ("betas: ", "list", "'x'")),
    ({"metadata": {"user_id": 1}}, ("metadata.user_id: ", "string", "1")),
    ({"service_tier": 1}, ("service_tier: ", "string", "1")),
    ({"speed": 2}, ("speed: ", "string", "2")),
    ({"extra_body": {"cache_control": "x"}}, ("cache_control: ", "dictionary", "'x'")),
    (
        block({"type": "text", "text": "x", "cache_control": 1}),
        ("messages.0.content.0.cache_control: ", "dictionary", "1"),
    ),
    (
        block({"type": "tool_result", "tool_use_id": "1", "is_error": "no"}),
        ("messages.0.content.0.is_error: ", "boolean", "'no'"),
    ),
    ({"tools": [tool(cache_control=1)]}, ("tools.0.cache_control: ", "dictionary", "1")),
    (
        {"tools": [tool()], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        ("tool_choice.disable_parallel_tool_use: ", "boolean", "1"),
    ),
]


@pytest.mark.parametrize(("fields", "said"), MESSAGES_REFUSED, ids=ids)
def test_what_a_message_cannot_have_is_refused(
    messages: anthropic.Anthropic, fields: dict[str, Any], said: tuple[str, ...]
) -> None:
    asked = [{"role": "user", "content": "x"}]
    for stream in (False, True):
        body = {"model": MODEL, "max_tokens": 5, "messages": asked, "stream": stream, **fields}
        extra: Any = {"extra_body": body.pop("extra_body", None)}
        with pytest.raises(anthropic.BadRequestError) as error:
            messages.beta.messages.create(**body, **extra)
        assert error.value.type == "invalid_request_error"
        told: Any = error.value.body
        assert all(part in told["error"]["message"] for part in said), told


def test_every_field_of_the_official_clients_is_known() -> None:
    official = set(get_type_hints(response_create_params.ResponseCreateParamsBase))
    assert official - set(ResponseRequest.model_fields) == set()
    in_headers = {"user_profile_id", "workspace_id"}  # older clients lack the second
    official = set(get_type_hints(message_create_params.MessageCreateParamsBase))
    assert official - set(MessagesRequest.model_fields) == official & in_headers


def hints_of(*modules: Any) -> list[str]:
    kinds = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseModel)
    ]
    return sorted(
        {
            name
            for kind in kinds
            for name, field in kind.model_fields.items()
            if field.description == "Accepted, without effect."
        }
    )


@pytest.mark.parametrize("name", hints_of(messages_requests, responses_requests, responses_items))
def test_every_hint_is_documented(name: str) -> None:
    assert f"`{name}`" in DOCUMENTED or f".{name}`" in DOCUMENTED
