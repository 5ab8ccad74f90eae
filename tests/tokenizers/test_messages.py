"""Conversations in OpenAI's shape: what every family refuses, and what none lets through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers import ChatTokenizer
from glm_multiuser.tokenizers.glm4 import SPECIAL_TOKENS

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "c"}
TOOL = {"role": "tool", "content": "d"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LOOKALIKES = [
    *SPECIAL_TOKENS,
    "</s>",
    "sop",
    "<|im_end|>",
    "<|im_start|>",
    "<eop>",
    "\n",
    "<|",
    "a",
]


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def knows_tools(tokenizer: ChatTokenizer) -> bool:
    try:
        tokenizer.answer_reader(TOOLS)
    except InvalidParameterError:
        return False
    return True


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("ab", "messages is 'ab'"),
        (USER, "messages is"),
        (5, "messages is 5"),
        ([], "messages is empty"),
        (["a"], r"messages\[0\] is 'a'"),
        ([{"role": "friend", "content": "a"}], r"messages\[0\] has role 'friend'.*one of system"),
        ([{"content": "a"}], r"messages\[0\] has role None"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\] has role \['user'\]"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is NoneType"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\['content'\].*surrogate"),
        ([USER, {"role": "assistant", "content": None}, USER], r"messages\[1\]\['content'\]"),
        ([ASSISTANT, USER], r"messages\[0\] has role 'assistant'; at the beginning"),
        ([USER, USER], r"messages\[1\] has role 'user'; after one of role 'user'.* assistant"),
        ([USER, SYSTEM], r"messages\[1\] has role 'system'"),
        ([SYSTEM, SYSTEM, USER], r"messages\[1\] has role 'system'.* user"),
        ([USER, ASSISTANT], r"messages\[1\] is the last one .*'assistant'"),
        ([SYSTEM], r"messages\[0\] is the last one .*'system'"),
        ([USER, ASSISTANT, TOOL], r"messages\[2\] has role 'tool'"),
    ],
)
def test_a_wrong_conversation_names_its_place(
    small_tokenizer: ChatTokenizer, messages: Any, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        small_tokenizer.encode_messages(messages)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({**ASSISTANT, "tool_calls": 5}, r"\['tool_calls'\] is 5"),
        ({**ASSISTANT, "tool_calls": [5]}, r"\['tool_calls'\]\[0\] is 5"),
        (call(name="f"), r"\['arguments'\] is NoneType"),
        (call(name="f", arguments="[]"), r"\['arguments'\] is '\[\]'"),
        (call(name="f", arguments="{"), r"JSON object"),
        (call(name="f", arguments='{"a":' + "[" * 900 + "]" * 900 + "}"), r"at most 64 levels"),
        (call(arguments="{}"), r"\['name'\] is None"),
        (call(name="f", arguments="{}"), r"messages\[2\] has role 'user'.*tool"),
    ],
)
def test_a_wrong_call_names_its_place(
    small_tokenizer: ChatTokenizer, broken: Any, message: str
) -> None:
    if not knows_tools(small_tokenizer):
        message = r"messages\[1\] has tool_calls"
    with pytest.raises(InvalidParameterError, match=message):
        small_tokenizer.encode_messages([USER, broken, USER])


def test_families_without_tools_say_so(small_tokenizer: ChatTokenizer) -> None:
    if knows_tools(small_tokenizer):
        ids = small_tokenizer.encode_messages([USER], TOOLS)
        assert len(ids) > len(small_tokenizer.encode_messages([USER]))
        return
    for use in (
        lambda: small_tokenizer.encode_messages([USER], TOOLS),
        lambda: small_tokenizer.answer_reader(TOOLS),
    ):
        with pytest.raises(InvalidParameterError, match=r"tools is .*must be empty"):
            use()


def test_a_prompt_is_a_conversation(small_tokenizer: ChatTokenizer) -> None:
    told = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "你好"}]
    ids = small_tokenizer.encode_messages(told)
    assert small_tokenizer.encode_prompt("你好", [SYSTEM, ("a", "b")]) == ids
    assert small_tokenizer.encode_prompt("你好", told[:-1]) == ids
    assert small_tokenizer.encode_messages([USER]) == small_tokenizer.encode_prompt("a")


@settings(deadline=None, max_examples=30)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(LOOKALIKES), min_size=1, max_size=4).map("".join),
        min_size=3,
        max_size=3,
    )
)
def test_no_text_writes_a_special_token(any_tokenizer: ChatTokenizer, texts: list[str]) -> None:
    special = set(any_tokenizer.stop_token_ids)
    names = getattr(any_tokenizer, "special", {})
    special.update(names.values(), getattr(any_tokenizer, "special_ids", ()))

    def found(*three: str) -> list[int]:
        roles = ("user", "assistant", "user")
        told = [{"role": role, "content": text} for role, text in zip(roles, three)]
        return [one for one in any_tokenizer.encode_messages(told) if one in special]

    assert found(*texts) == found("a", "b", "c")
    for text in texts:
        assert not special.intersection(any_tokenizer.encode(text))
