"""Validation of request bodies of `/v1/*`, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from glm_multiuser.server.openai.requests import (
    BaseRequest,
    ChatRequest,
    CompletionRequest,
)

MESSAGES = [{"role": "user", "content": "hello"}]
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NEUTRAL: dict[str, list[Any]] = {
    # vLLM
    "chat_template": [],
    "chat_template_kwargs": [{}],
    "include_stop_str_in_output": [False],
    "length_penalty": [1, 1.0],
    "priority": [0],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "use_beam_search": [False],
    # llama.cpp
    "dry_multiplier": [0.0],
    "dynatemp_range": [0.0],
    "grammar": [""],
    "id_slot": [-1],
    "mirostat": [0],
    "n_predict": [-1],
    "n_probs": [0],
    "repeat_penalty": [1.0],
    "samplers": [],
    "timings_per_token": [False],
    "top_n_sigma": [-1, -1.0],
    "typical_p": [1.0],
    "xtc_probability": [0.0],
}
NEUTRAL_IN_CHAT: dict[str, list[Any]] = {
    **NEUTRAL,
    "add_special_tokens": [False],
    "audio": [],
    "best_of": [1],
    "echo": [False],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "modalities": [["text"]],
    "moderation": [],
    "web_search_options": [],
}
NEUTRAL_IN_COMPLETIONS: dict[str, list[Any]] = {
    **NEUTRAL,
    "add_special_tokens": [True],
}
NEVER_NEUTRAL: tuple[Any, ...] = (0.5, "x", ["x"], {"x": 1})
# For Python these equal a neutral value, for a client they do not.
TYPED_OTHERWISE = {
    "mirostat": False,
    "skip_special_tokens": 1,
}
WITHOUT_EFFECT = {
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": "30m"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(json.loads(json.dumps({"messages": MESSAGES, **fields})))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(json.loads(json.dumps({"prompt": "hello", **fields})))


def problem_of(kind: type[BaseRequest], fields: dict[str, Any]) -> tuple[str, str]:
    """Where the first problem is, and what it is."""
    try:
        kind.model_validate(json.loads(json.dumps(fields)))
    except ValidationError as error:
        problem = error.errors()[0]
        return ".".join(map(str, problem["loc"])), problem["msg"]
    raise AssertionError(f"{fields} was accepted")


def chat_problem(**fields: Any) -> tuple[str, str]:
    return problem_of(ChatRequest, {"messages": MESSAGES, **fields})


def completion_problem(**fields: Any) -> tuple[str, str]:
    return problem_of(CompletionRequest, {"prompt": "hello", **fields})


def test_every_field_of_the_official_client_is_known() -> None:
    ours_alone = {"stream", "user", "n"}
    official = set(chat_params.CompletionCreateParamsBase.__annotations__)
    assert official - set(ChatRequest.model_fields) == set()
    assert ours_alone <= set(ChatRequest.model_fields)
    official = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert official - set(CompletionRequest.model_fields) == set()


@pytest.mark.parametrize(("field", "values"), NEUTRAL_IN_CHAT.items())
def test_what_chat_does_not_implement_is_taken_where_it_changes_nothing(
    field: str, values: list[Any]
) -> None:
    for value in [*values, None]:
        chat(**{field: value})
    for value in [*NEVER_NEUTRAL, TYPED_OTHERWISE.get(field, "x")]:
        place, message = chat_problem(**{field: value})
        assert place == field
        assert "not implemented" in message


@pytest.mark.parametrize(("field", "values"), NEUTRAL_IN_COMPLETIONS.items())
def test_what_completions_do_not_implement_is_taken_where_it_changes_nothing(
    field: str, values: list[Any]
) -> None:
    for value in [*values, None]:
        completion(**{field: value})
    for value in [*NEVER_NEUTRAL, TYPED_OTHERWISE.get(field, "x")]:
        place, message = completion_problem(**{field: value})
        assert place == field
        assert "not implemented" in message


@pytest.mark.parametrize(("field", "value"), WITHOUT_EFFECT.items())
def test_what_changes_no_answer_is_taken(field: str, value: Any) -> None:
    chat(**{field: value})


def test_the_message_about_a_field_says_what_it_can_be() -> None:
    _, message = chat_problem(function_call="required")
    assert '"none" or "auto" or null' in message


@pytest.mark.parametrize("choice", ["any", True, {"type": "function"}])
def test_another_tool_choice_is_rejected(choice: Any) -> None:
    place, _ = chat_problem(tool_choice=choice)
    assert place.startswith("tool_choice")


def test_tools_are_offered_as_they_were_given() -> None:
    parameters = {"type": "object", "properties": {"b": {"default": None}, "a": {}}}
    function = {"parameters": parameters, "name": "f", "strict": True, "description": None}
    tools = [{"type": "function", "function": function}]
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert chat(tools=tools).offered == offered
    assert json.dumps(chat(tools=tools, tool_choice="auto").offered) == json.dumps(offered)
    assert chat(tools=tools, tool_choice="none").offered == []
    assert chat(tools=[]).offered == chat(tools=None).offered == []


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ("f", "tools.0"),
        ({"type": "custom", "custom": {"name": "f"}}, "tools.0.type"),
        ({"type": "function"}, "tools.0.function"),
        ({"type": "function", "function": {}}, "tools.0.function.name"),
        ({"type": "function", "function": {"name": 5}}, "tools.0.function.name"),
        (
            {"type": "function", "function": {"name": "f", "parameters": []}},
            "tools.0.function.parameters",
        ),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tools.0.function.x"),
    ],
)
def test_a_tool_that_is_none_is_named(tool: Any, place: str) -> None:
    assert chat_problem(tools=[tool])[0] == place


def test_tools_are_not_without_end() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert len(chat(tools=[tool] * 128).offered) == 128
    assert chat_problem(tools=[tool] * 129)[0] == "tools"


@pytest.mark.parametrize(
    "field", ["temprature", "min_pp", "prompt", "suffix", "provider_specific_fields"]
)
def test_a_field_that_chat_does_not_have_is_refused(field: str) -> None:
    assert chat_problem(**{field: None})[0] == field


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"structured_outputs": {"content": {}}}, "structured_outputs.content"),
        ({"response_format": {"type": "json_object", "content": {}}}, "response_format.content"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"content": {}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_schema_has_its_own_name_only(fields: dict[str, Any], place: str) -> None:
    assert chat_problem(**fields)[0] == place


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 2.0, 100], [-0.1, 100.1, "1", True, [1], float("nan")]),
        ("top_p", [0.001, 1], [0, 1.001, "1", True, float("nan")]),
        ("max_tokens", [1, 10**12, -1], [0, -2, -1.0, 1.5, "1", True]),
        ("max_completion_tokens", [1, -1], [0, "1"]),
        ("seed", [0, 2**63 - 1], [-2, 2**63, 0.5, "1"]),
        ("n", [1, 128], [0, -1, 1.5, "1"]),
        ("top_k", [0, 50, -1], [-2, 1.5]),
        ("repetition_penalty", [0.1, 1, 100], [0, 101, "1"]),
        ("min_tokens", [0, 5], [-1, 1.5]),
        ("ignore_eos", [True, False], [1, "true"]),
        ("return_token_ids", [True], [1]),
        ("stream", [True, False], [1, "yes"]),
        ("logprobs", [True, False], [1, 5]),
        ("top_logprobs", [0, 20], [-1, 21, True]),
        ("user", ["", "anna"], [5, ["anna"]]),
        ("model", ["glm"], [5]),
        ("stop_token_ids", [[], [5, 0]], [5, [-1], ["a"], [1.5]]),
        ("stream_options", [{}, {"include_usage": True}], [5, {"x": 1}, {"include_usage": 1}]),
    ],
)
def test_ranges_and_types(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in [*good, None]:
        assert getattr(chat(**{field: value}), field) is not None or value is None
    for value in bad:
        assert chat_problem(**{field: value})[0].partition(".")[0] == field, value


def test_options_that_some_clients_add_to_streams_are_taken() -> None:
    options = {
        "include_usage": True,
        "include_obfuscation": False,
        "continuous_usage_stats": True,
    }
    assert chat(stream_options=options).include_usage
    assert not chat(stream_options={"include_usage": None}).include_usage
    assert not chat().include_usage


@pytest.mark.parametrize(
    ("stop", "read"),
    [(None, []), ("。", ["。"]), (["a", "bc"], ["a", "bc"]), ([], []), (["x" * 256] * 16, None)],
)
def test_stop_is_a_text_or_a_list(stop: Any, read: Any) -> None:
    assert chat(stop=stop).stop == (stop if read is None else read)


@pytest.mark.parametrize(
    ("stop", "place"),
    [
        ("", "stop.0"),
        ("x" * 257, "stop.0"),
        (["a", ""], "stop.1"),
        (["a", 5], "stop.1"),
        (["a"] * 17, "stop"),
        (5, "stop"),
        ({"a": 1}, "stop"),
    ],
)
def test_a_stop_that_cannot_be_is_named(stop: Any, place: str) -> None:
    assert chat_problem(stop=stop)[0] == place


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("你好", "你好"),
        ("", ""),
        ([{"type": "text", "text": "你"}, {"type": "text", "text": "好"}], "你好"),
        ([{"type": "text", "text": "a", "prompt_cache_breakpoint": {}}], "a"),
        ([], ""),
    ],
)
def test_content_is_a_text_or_parts_of_one(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages[0].content == text


@pytest.mark.parametrize(
    "content",
    [
        None,
        5,
        ["a"],
        {"type": "text", "text": "a"},
        [{"type": "text"}],
        [{"type": "text", "text": 5}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "refusal", "refusal": "no"}],
        [{"type": "thinking", "text": "a"}],
        [{"text": "a"}],
    ],
)
def test_content_that_is_no_text_is_refused(content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert chat_problem(messages=messages)[0] == "messages.0.content"


def test_the_part_that_is_no_text_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_audio"}]
    assert "part 1" in chat_problem(messages=[{"role": "user", "content": parts}])[1]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "tool", "content": "x"}, "messages.0.tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "messages.0.tool_call_id"),
        ({"role": "tool", "tool_call_id": "1"}, "messages.0.content"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages.0.tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALLED]}, "messages.0.tool_calls"),
        ({"role": "assistant", "content": None}, "messages.0.content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages.0.content"),
        ({"role": "user"}, "messages.0.content"),
        ({"content": "x"}, "messages.0.role"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages.0.audio"),
        (
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            "messages.0.function_call",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls.0.id"),
        ("x", "messages.0"),
    ],
)
def test_a_message_that_cannot_be_is_named(message: Any, place: str) -> None:
    assert chat_problem(messages=[message])[0] == place


def test_minus_one_is_what_it_is_for_other_servers() -> None:
    read = chat(top_k=-1, seed=-1, max_tokens=-1)
    assert (read.top_k, read.seed) == (0, None)
    assert read.max_tokens is not None
    assert read.max_tokens > 10**6  # so a checkpoint's own limit does not count, either
    assert completion(top_k=-1).top_k == 0


def test_the_description_says_what_is_accepted() -> None:
    properties = ChatRequest.model_json_schema()["properties"]
    for field in ("top_k", "seed", "max_tokens", "max_completion_tokens"):
        (beside,) = (one for one in properties[field]["anyOf"] if "const" in one)
        assert beside["const"] == -1
    assert properties["mirostat"]["enum"] == [0, None]


@pytest.mark.parametrize(
    "beside",
    [
        {"name": "anna"},
        {"refusal": "no", "annotations": [{"type": "url_citation"}]},
        {"provider_specific_fields": {"refusal": None}},
        {"reasoning_content": "well", "reasoning": "well", "reasoning_details": [{"text": "x"}]},
        {"audio": None, "function_call": None, "parsed": {"a": 1}, "cache_control": {}},
    ],
)
def test_what_clients_add_to_messages_is_ignored(beside: dict[str, Any]) -> None:
    plain = {"role": "assistant", "content": "x", "tool_calls": [CALLED]}
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    called = {**CALLED, "index": 0, "function": function}
    told = chat(messages=[*MESSAGES, {**plain, **beside, "tool_calls": [called]}])
    assert told == chat(messages=[*MESSAGES, plain])


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    chat(messages=[*MESSAGES, answer, *MESSAGES])


def test_messages_are_not_without_end() -> None:
    chat(messages=MESSAGES * 1024)
    assert chat_problem(messages=MESSAGES * 1025)[0] == "messages"
    assert chat_problem(messages=[])[0] == "messages"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("hello", ["hello"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, read: Any) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]], [[5], []], [5, "a"], ["a", [5]], [True], [[True]], [1.5], {}]
)
def test_a_prompt_of_no_known_form_is_refused(prompt: Any) -> None:
    assert completion_problem(prompt=prompt)[0] == "prompt"


def test_completions_want_a_number_of_logprobs() -> None:
    assert [completion(logprobs=count).logprobs for count in (None, 0, 20)] == [None, 0, 20]
    for value in (True, -1, 21):
        assert completion_problem(logprobs=value)[0] == "logprobs"


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_description_says_what_is_checked(kind: type[BaseRequest]) -> None:
    fields = kind.model_json_schema()["properties"]
    assert fields["presence_penalty"]["anyOf"][0]["maximum"] == 2
    assert fields["stop"]["anyOf"][1]["maxItems"] == 16
    assert fields["n"]["maximum"] == 8
    assert kind.model_json_schema()["additionalProperties"] is False
