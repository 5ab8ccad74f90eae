"""Content and calls of tools in answers, however these arrive."""

from __future__ import annotations

import json
import math
from typing import Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers import AnswerReader, ToolCall
from glm_multiuser.tokenizers.answers import TaggedAnswerReader
from glm_multiuser.tokenizers.calls import (
    LONGEST_CALL,
    read_json_arguments,
    read_python_call,
    write_python_call,
)
from glm_multiuser.tokenizers.glm4 import read_call
from glm_multiuser.tokenizers.headers import HeaderAnswerReader

TOOLS = [
    {"type": "function", "function": {"name": "get_weather"}},
    {"type": "function", "function": {"name": "get"}},
]
CALL = "```python\ntool_call(city='北京')\n```"
READ = ToolCall("get_weather", '{"city": "北京"}')
TAGGED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京"}}\n</tool_call>'
UNQUOTED = '<tool_call>{"name": "get", "arguments": {"city": "x}}</tool_call>'

DEEP = json.loads("[" * 70 + "]" * 70)


def read(reader: AnswerReader, *pieces: str) -> tuple[str, tuple[ToolCall, ...]]:
    content = "".join(reader.feed(piece) for piece in pieces)
    end = reader.finish()
    return content + end.text, end.tool_calls


def chatglm3(tools: Any = ()) -> AnswerReader:
    return HeaderAnswerReader(tools, read_python_call)


def glm4(tools: Any = ()) -> AnswerReader:
    return HeaderAnswerReader(tools, read_call)


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("\n 你好", "你好", ()),
        (" \n\n 你好\n ", "你好\n ", ()),
        ("你好", "你好", ()),
        ("你好\n再见", "你好\n再见", ()),
        ("", "", ()),
        (" ", "", ()),
        (f"get_weather\n{CALL}", "", (READ,)),
        (f"get_weather\n {CALL}\n", "", (READ,)),
        (f"get_weather\n{CALL[:-4]}", f"get_weather\n{CALL[:-4]}", ()),
        ("get_weather", "get_weather", ()),
        ("get_\nx", "get_\nx", ()),
        (f"another\n{CALL}", f"another\n{CALL}", ()),
        (f"\nwait<|assistant|>get_weather\n{CALL}", "wait", (READ,)),
        (f"get_weather\n{CALL}<|assistant|>\n 好", "好", (READ,)),
        (
            f"get_weather\n{CALL}<|assistant|>get\n{CALL}",
            "",
            (READ, ToolCall("get", READ.arguments)),
        ),
        ("\n一<|assistant|>\n二", "一\n二", ()),
        ("\n一<|assis", "一<|assis", ()),
    ],
)
def test_answers_with_a_header(answer: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert read(chatglm3(TOOLS), answer) == (content, calls)
    assert read(chatglm3(TOOLS), *answer) == (content, calls)


def test_without_tools_everything_is_text() -> None:
    assert read(chatglm3(), *f"get_weather\n{CALL}") == (f"get_weather\n{CALL}", ())
    reader = chatglm3()
    assert [reader.feed(piece) for piece in ("\n", " ", "a", "b")] == ["", "", "a", "b"]
    reader = chatglm3()
    assert [reader.feed(piece) for piece in ("a", "b\n")] == ["a", "b\n"]


def test_a_line_that_can_be_no_tool_does_not_wait() -> None:
    reader = chatglm3(TOOLS)
    assert [reader.feed(piece) for piece in ("get", "_w", "a", "r")] == ["", "", "get_wa", "r"]


@pytest.mark.parametrize("arguments", ['{"city": "北京"}', "{}", '{"a": [1, {"b": null}]}'])
def test_calls_of_glm4(arguments: str) -> None:
    answer = f"get_weather\n{arguments}\n"
    assert read(glm4(TOOLS), *answer) == ("", (ToolCall("get_weather", arguments),))


@pytest.mark.parametrize(
    "arguments",
    [
        *("[]", "{", "x", "", '{"a": NaN}', "[" * 100_000, json.dumps({"a": DEEP})),
        r'{"a": "\ud800"}',
        r'{"\udc00": 1}',
    ],
)
def test_what_is_no_call_of_glm4(arguments: str) -> None:
    content, calls = read(glm4(TOOLS), f"get_weather\n{arguments}")
    assert calls == ()
    assert content == f"get_weather\n{arguments}"


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ("你好 \n", "你好 \n", ()),
        (TAGGED, "", (READ,)),
        (f"wait\n{TAGGED}\n{TAGGED}\n", "wait", (READ, READ)),
        (f"a {TAGGED} b", "a b", (READ,)),
        ("<tool_call>\n{}\n</tool_call> x", "<tool_call>\n{}\n</tool_call> x", ()),
        (TAGGED.replace("get_weather", "other"), TAGGED.replace("get_weather", "other"), ()),
        (TAGGED[:-3], TAGGED[:-3], ()),
        ("a <tool_", "a <tool_", ()),
        ("a\n<tool_call>{", "a\n<tool_call>{", ()),
        (TAGGED.replace("北京", "\\ud800"), TAGGED.replace("北京", "\\ud800"), ()),
        (f"{UNQUOTED}{TAGGED}", UNQUOTED, (READ,)),
        (f"{UNQUOTED}\n{TAGGED}\n{TAGGED}", UNQUOTED, (READ, READ)),
    ],
)
def test_answers_with_tags(answer: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert read(TaggedAnswerReader(TOOLS), answer) == (content, calls)
    assert read(TaggedAnswerReader(TOOLS), *answer) == (content, calls)


@given(parts=st.lists(st.sampled_from(['"', "\\", "</tool_call>", "<tool_call>", "\n", "a"])))
def test_tags_in_strings_end_no_call(parts: list[str]) -> None:
    arguments = json.dumps({"a": "".join(parts)})
    answer = TAGGED.replace('{"city": "北京"}', arguments)
    calls = (ToolCall("get_weather", arguments),)
    assert read(TaggedAnswerReader(TOOLS), *answer) == ("", calls)


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ('"get"', "get"),
        ('"\\u0067et"', "get"),
        ('"get_weather"', "get_weather"),
        ('"other"', None),
        ('"ge\nt"', None),
        ('"\\q"', None),
        ('"\\ud800"', None),
    ],
)
def test_only_a_call_of_an_offered_tool_has_begun(name: str, begun: Optional[str]) -> None:
    reader = TaggedAnswerReader(TOOLS)
    assert reader.feed(f'<tool_call>\n{{"name": {name}, "arguments": {{"a": 1') == ""
    assert reader.begun_call == (begun and ToolCall(begun, '{"a":'))


PARTS = [
    "\n",
    " ",
    "get",
    "_weather",
    CALL,
    "<|assistant|>",
    "<|",
    TAGGED,
    UNQUOTED,
    "<tool_call>",
    "a",
    "{}",
]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    marks=st.lists(st.integers(0, 400), max_size=8),
    kind=st.sampled_from([chatglm3, glm4, TaggedAnswerReader, lambda _: AnswerReader()]),
)
def test_the_result_does_not_depend_on_the_pieces(
    parts: list[str], marks: list[int], kind: Any
) -> None:
    answer = "".join(parts)
    places = sorted(marks)
    pieces = [answer[start:end] for start, end in zip([0, *places], [*places, len(answer)])]
    pieces[-1:] = [answer[places[-1] :] if places else answer]
    assert read(kind(TOOLS), *pieces) == read(kind(TOOLS), answer)


@given(text=st.text())
def test_plain_answers_stay(text: str) -> None:
    assert read(AnswerReader(), *text) == (text, ())


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 4400, "1.0", "1e400"])
def test_arguments_keep_numbers_that_python_cannot_hold(number: str) -> None:
    arguments = f'{{"a": [{number}], "b": "1e999"}}'
    called = ToolCall("get", arguments)
    assert read(chatglm3(TOOLS), f"get\n```python\ntool_call(**{arguments})\n```") == (
        "",
        (called,),
    )
    assert read(glm4(TOOLS), f"get\n{arguments}") == ("", (called,))
    tagged = f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'
    assert read(TaggedAnswerReader(TOOLS), tagged) == ("", (called,))
    values = read_json_arguments(arguments)
    assert values is not None
    assert math.isfinite(values["a"][0])


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=50)
@given(
    arguments=st.dictionaries(
        st.sampled_from(["city", "from", "a-b", "名", "Ａ股", ""]), json_values
    )
)
def test_a_written_call_is_read_again(arguments: dict[str, Any]) -> None:
    found = read_python_call(write_python_call(arguments))
    assert found is not None
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    "code",
    [
        "",
        "tool_call('Beijing')",
        "tool_call(city=city)",
        "tool_call(city=__import__('os').system('true'))",
        "tool_call(city='a' + 'b')",
        "tool_call(city=open('/etc/passwd').read())",
        "tool_call(city='a'); tool_call(city='b')",
        "tool_call(city='a')(b=1)",
        "tools.call(city='a')",
        "(lambda city: city)(city='a')",
        "tool_call(city=f'{1}')",
        "tool_call(city={1, 2})",
        "tool_call(city=b'a')",
        "tool_call(city=1e999)",
        "tool_call(city='\\ud800')",
        "tool_call(**[('a', 1)])",
        "tool_call(**{1: 2})",
        "tool_call(*'ab')",
        "tool_call(city='\x00')",
        "tool_call(city=" + "[" * 5000 + "]" * 5000 + ")",
        "tool_call(city=" + "-" * 9000 + "1)",
        "tool_call(city=" + "1+" * 9000 + "1)",
        "tool_call(city='" + "a" * LONGEST_CALL + "')",
    ],
)
def test_what_is_no_call(code: str) -> None:
    assert read_python_call(code) is None
    assert read_python_call(f"```python\n{code}\n```") is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("ab", "tools is 'ab'"),
        ([5], r"tools\[0\] is 5"),
        ([{"name": "f"}], r"tools\[0\] is .*function"),
        ([TOOLS[0], {"type": "function", "function": {}}], r"tools\[1\].*\['name'\] is None"),
        ([{"type": "function", "function": {"name": "a\nb"}}], r"\['name'\] is 'a\\nb'"),
        ([{"type": "function", "function": {"name": "f", "x": {1}}}], r"tools\[0\].*JSON"),
        ([{"type": "function", "function": {"name": "f", "x": DEEP}}], r"71 levels.*may have 64"),
    ],
)
def test_tools_of_another_shape(tools: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        chatglm3(tools)
