"""Conversations in OpenAI's shape: what every family refuses, and what none lets through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers import ChatGLM6BTokenizer, ChatTokenizer
from glm_multiuser.tokenizers.glm4 import SPECIAL_TOKENS
from glm_multiuser.tokenizers.messages import questions_and_answers

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
        ([10**5000], r"messages\[0\] is <int>"),
        ([{"role": "friend", "content": "a"}], r"messages\[0\] has role 'friend'.*one of system"),
        ([{"content": "a"}], r"messages\[0\] has role None"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\] has role \['user'\]"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is NoneType"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\['content'\].*surrogate"),
        ([USER, {"role": "assistant", "content": None}, USER], r"messages\[1\]\['content'\]"),
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
    conversation = [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "你好"}]
    ids = small_tokenizer.encode_messages(conversation)
    assert small_tokenizer.encode_prompt("你好", [SYSTEM, ("a", "b")]) == ids
    assert small_tokenizer.encode_prompt("你好", conversation[:-1]) == ids
    assert small_tokenizer.encode_messages([USER]) == small_tokenizer.encode_prompt("a")


@pytest.mark.slow
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
        conversation = [{"role": role, "content": text} for role, text in zip(roles, three)]
        return [one for one in any_tokenizer.encode_messages(conversation) if one in special]

    assert found(*texts) == found("a", "b", "c")
    for text in texts:
        assert not special.intersection(any_tokenizer.encode(text))


def asks(*texts: str) -> list[dict[str, str]]:
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[text[0]], "content": text} for text in texts]


WRITTEN_BY_LLAMA_2 = (("u1", "s1", "u2"), ("u1", "a1"), ("s1",))
"""Its template insists on questions in even places, and on nothing else."""
ONE_SYSTEM_MESSAGE = ("llama2", "qwen2")
"""Templates that write the first message only if it is a system's."""


@pytest.mark.parametrize(
    "texts",
    [
        ("u1", "u2"),
        ("s1", "s2", "u1"),
        ("u1", "s1", "u2"),
        ("u1", "a1", "s1", "u2"),
        ("a1", "u1"),
        ("u1", "a1", "a2", "u2"),
        ("u1", "a1"),
        ("s1",),
    ],
)
def test_any_order_that_the_format_has(
    small_tokenizer: ChatTokenizer, request: pytest.FixtureRequest, texts: tuple[str, ...]
) -> None:
    name = request.node.callspec.params["small_tokenizer"]
    told = asks(*texts)
    if name == "llama2" and texts not in WRITTEN_BY_LLAMA_2:
        with pytest.raises(InvalidParameterError, match="Roles must alternate"):
            small_tokenizer.encode_messages(told)
        return
    shown = b"".join(map(small_tokenizer.token_bytes, small_tokenizer.encode_messages(told)))
    place = -1
    for text in texts:
        if text[0] == "s" and name in ONE_SYSTEM_MESSAGE and (name, texts) != ("qwen2", ("s1",)):
            continue
        assert shown.count(text.encode()) == 1
        assert shown.index(text.encode()) > place
        place = shown.index(text.encode())


def test_roles_that_a_format_of_rounds_does_not_have() -> None:
    def rounds(*texts: str, **options: bool) -> tuple[list[str], list[str]]:
        return questions_and_answers(asks(*texts), **options)

    assert rounds("u1", "u2") == (["u1\n\nu2"], [])
    assert rounds("s1", "u1", "a1", "s2", "u2") == (["s1\nu1", "s2\nu2"], ["a1"])
    assert rounds("s1", "s2", "u1", "u2") == (["s1\ns2\nu1\n\nu2"], [])
    assert rounds("u1", "s1") == (["u1\n\ns1"], [])
    assert rounds("a1", "u1") == (["", "u1"], ["a1"])
    assert rounds("u1", "a1", "a2") == (["u1", ""], ["a1\n\na2"])
    assert rounds("u1", "a1", "u2", "a2", continue_final_message=True) == (
        ["u1", "u2"],
        ["a1", "a2"],
    )


def test_an_answer_whose_beginning_is_known(small_tokenizer: ChatTokenizer) -> None:
    """The prompt ends with it, and there is nothing behind it."""
    told = asks("u1", "a1", "u2", "a you ")
    ids = small_tokenizer.encode_messages(told, continue_final_message=True)
    shown = b"".join(map(small_tokenizer.token_bytes, ids))
    assert shown.replace(b"[gMASK]<sop>", b"").rstrip().endswith(b"a you")
    begun = small_tokenizer.encode_messages(told[:-1])
    both = zip(ids, begun)
    same = next((place for place, (one, other) in enumerate(both) if one != other), len(begun))
    assert same >= len(begun) - 3  # but for where the answer of ChatGLM-6B begins


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (USER, r"messages\[1\] is the last one and has role 'user'; with continue_final_message"),
        (call(name="f", arguments="{}"), r"tool_calls"),
    ],
)
def test_only_an_answer_can_be_continued(
    small_tokenizer: ChatTokenizer, last: Any, message: str
) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        small_tokenizer.encode_messages([USER, last], continue_final_message=True)


def test_a_continued_answer_keeps_its_first_space(small_tokenizer: ChatTokenizer) -> None:
    ids = small_tokenizer.encode("the fox")
    for continued in (False, True):
        tokens = small_tokenizer.answer_tokens(continued=continued)
        detokenizer = small_tokenizer.detokenizer(continued=continued)
        text = detokenizer.push(ids) + detokenizer.flush()
        assert b"".join(map(tokens.add, ids)).decode() == text
        assert text in ("the fox", " the fox" if continued else "the fox")
        reader = small_tokenizer.answer_reader(continued=continued)
        content = reader.feed(text) + reader.finish().text
        assert content == text


def test_tokens_of_an_answer_join_to_its_content(any_tokenizer: ChatTokenizer) -> None:
    texts = ("hello the fox, 你好!", "\n hello", " \n\n fox", "\n\u3000\u3000你好", "\n\xa0 fox")
    for said in texts:
        ids = any_tokenizer.encode(said)
        shown, tokens = [], any_tokenizer.answer_tokens()
        for one in ids:
            shown.append(tokens.shown(one))
            tokens.add(one)
        reader = any_tokenizer.answer_reader()
        text = any_tokenizer.decode(ids)
        content = reader.feed(text) + reader.finish().text
        joined = b"".join(shown).decode()
        if isinstance(any_tokenizer, ChatGLM6BTokenizer):
            content = content.replace(" ,", ",")  # its clean-up changes texts of several tokens
            joined = joined.replace(" ,", ",").replace(" !", "!")
        assert joined == content
