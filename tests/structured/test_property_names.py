"""A property of an object cannot be written twice: the second would replace the first."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import Allows, compiler_of

CITY = {"type": "object", "properties": {"城市": {"type": "string"}}, "required": ["城市"]}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="its newest llguidance allows escapes")
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (CITY, r'{"城市": "北京", "\u57ce\u5e02": 1}'),
        ({**CITY, "properties": {"a": {"const": 1}}, "required": ["a"]}, r'{"a": 1, "\u0061": 2}'),
        ({"type": "object", "patternProperties": {"^a": {"const": 1}}}, r'{"\u0061b": 2}'),
        (CITY, '{"城市": "北京", "城市": 1}'),
    ],
)
def test_a_name_has_one_spelling(allows: Allows, schema: dict[str, Any], text: str) -> None:
    assert not allows(schema, text)


@pytest.mark.parametrize("text", ['{"城市": "北京"}', r'{"城市": "\n\"\\", "b\t": 1}'])
def test_other_escapes_are_allowed(allows: Allows, text: str) -> None:
    assert allows(CITY, text)


@pytest.mark.parametrize("text", ["\x01", "\\\x1b[0m", r"\u0001", "\u00e9", "a\x7f"])
def test_constants_keep_every_character(allows: Allows, text: str) -> None:
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert allows({"const": text}, written)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        *((pattern, "a\x1b") for pattern in (r"^a\x1b$", r"^a\u001B$", r"^a\x{1b}$", "^a\x1b$")),
        (r"^a\v$", "a\x0b"),
        (r"^[\x00-\x07]{2}$", "\x01\x02"),
        (r"^[^\x00-\x1f]$", "é"),
        (r"^[\u4e00-\u9fa5]$", "城"),
    ],
)
def test_patterns_keep_every_character(allows: Allows, pattern: str, text: str) -> None:
    written = json.dumps(text, ensure_ascii=False)
    assert allows({"type": "string", "pattern": pattern}, written)
    named = {"type": "object", "patternProperties": {pattern: {"const": 1}}}
    assert allows({**named, "minProperties": 1}, f"{{{written}: 1}}")


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"additionalProperties": {"type": "integer"}}, 1),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, 3),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False}, 1),
    ],
)
def test_least_properties(chatglm3_tiny: ChatTokenizer, schema: dict[str, Any], most: int) -> None:
    def compile_with(least: int) -> None:
        grammar = Grammar.json_schema({"type": "object", **schema, "minProperties": least})
        compiler_of(chatglm3_tiny).compile(grammar)

    compile_with(most)
    with pytest.raises(
        InvalidParameterError, match=f"minProperties is {most + 1}, but may be at most {most} "
    ):
        compile_with(most + 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "object", "required": ["a", "b"]}, {"minProperties": 2}]},
        {"type": "object", "allOf": [{"required": ["a", "b"]}], "minProperties": 2},
        {"type": ["array", "string"], "minProperties": 2},
    ],
)
def test_others_may_require_what_least_properties_count(
    chatglm3_tiny: ChatTokenizer, schema: dict[str, Any]
) -> None:
    compiler_of(chatglm3_tiny).compile(Grammar.json_schema(schema))


def test_listed_properties_may_all_be_needed(allows: Allows) -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "minProperties": 2,
    }
    assert allows(closed, '{"a": 1, "b": 2}')


@pytest.mark.parametrize("name", ["类型", "List[int]", "My Type", "a/b", "a~b", "50%"])
def test_definitions_may_have_any_name(allows: Allows, name: str) -> None:
    pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    schema = {"$ref": f"#/$defs/{pointer}", "$defs": {name: {"const": 1}}}
    assert allows(schema, "1")


@pytest.mark.parametrize("place", ["x-types/A", "components/schemas/example", "$defs/x-A"])
def test_a_reference_may_lead_through_what_looks_like_an_annotation(
    allows: Allows, place: str
) -> None:
    schema: dict[str, Any] = {"const": 1}
    for name in reversed(place.split("/")):
        schema = {name: schema}
    assert allows({"$ref": f"#/{place}", **schema, "example": 5, "x-other": {"type": 7}}, "1")
