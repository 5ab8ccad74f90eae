"""Bounds of numbers that llguidance reads in another way than JSON Schema."""

from __future__ import annotations

import json
from typing import Any, Callable

import jsonschema
import pytest

from glm_multiuser import InvalidParameterError
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import Allows, compiler_of, tool

ZEROS = ("0", "-0", "0.0", "-0.0")
VALUES = (*ZEROS, "0.5", "-0.5", "0.25", "-0.25", "0.001", "3", "3.0", "3.1", "-3", "-3.1")


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.001", "0.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.001", "0.25"]),
        ({"exclusiveMinimum": 3, "maximum": 3.5}, ["3.1"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.25", "-0.5"]),
        ({"exclusiveMaximum": 0.0, "exclusiveMinimum": -0.5}, ["-0.25"]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, ["-3.1"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.001", "0.5"]),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5}, ["-0.25", "0", "0.25"]),
    ],
)
def test_exclusive_bounds(allows: Allows, bounds: dict[str, float], inside: list[str]) -> None:
    schema = {"type": "number", **bounds}
    allowed = [text for text in VALUES if allows(schema, text)]
    assert set(inside) <= set(allowed)
    for text in allowed:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": -(2**63)}, "-9000000000000000001", "-9223372036854775809"),
        ({"type": "integer", "minimum": -(10**25)}, "-5", "-10000000000000000000000001"),
        ({"type": "integer", "maximum": 2**63 - 1}, "9223372036854775807", "9223372036854775808"),
        ({"type": "integer", "maximum": 10**400}, "9223372036854775807", "1" + "0" * 400 + "1"),
        ({"type": ["integer", "null"], "minimum": -1e30}, "-9000000000000000000", "-1" + "0" * 31),
        ({"type": "number", "maximum": 1e30}, "8999999999999999999.5", "1" + "0" * 31),
        ({"type": "number", "exclusiveMinimum": -1e30, "maximum": 5}, "-1.5", "-1" + "0" * 31),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1e308}, "1.5", "-1"),
    ],
)
def test_bounds_beyond_64_bits(
    allows: Allows, schema: dict[str, Any], inside: str, outside: str
) -> None:
    assert allows(schema, inside)
    assert not allows(schema, outside)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 2**53 + 1}, "9007199254740994", "9007199254740992"),
        ({"exclusiveMinimum": 2**53 + 1}, "9007199254740996", "9007199254740993"),
        ({"maximum": -(2**53) - 1}, "-9007199254740994", "-9007199254740992"),
        ({"maximum": 1234567890123456789}, "1234567890123456768", "1234567890123456790"),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 3}, "9007199254740994", "9007199254740996"),
    ],
)
def test_bounds_that_are_no_float64(
    allows: Allows, bounds: dict[str, int], inside: str, outside: str
) -> None:
    schema = {"type": "integer", **bounds}
    assert allows(schema, inside)
    assert not allows(schema, outside)


@pytest.mark.parametrize(
    "value", [2**53 + 1, -(2**53) - 1, -(2**63), -(2**63) + 1, 10**400, -(2.0**63), -1e300]
)
@pytest.mark.parametrize(
    "schema_of",
    [
        lambda value: {"const": value},
        lambda value: {"type": "integer", "enum": [0, value]},
        lambda value: {"properties": {"a": {"const": {"b": [value]}}}},
        lambda value: {"$ref": "#/default", "default": {"const": value}},
        lambda value: {
            "$ref": "#/examples/0/default",
            "examples": [{"default": {"enum": [value]}}],
        },
    ],
)
def test_numbers_that_would_be_rounded(
    chatglm3_tiny: ChatTokenizer, schema_of: Callable[[float], dict[str, Any]], value: float
) -> None:
    """llguidance ends the process where an integer is at most about -2**63."""
    schema = schema_of(value)
    parameters = {"type": "object", "properties": {"id": schema}}
    for grammar in (
        Grammar.json_schema(schema),
        Grammar.lark(f"start: %json {json.dumps(schema)}"),
        Grammar.tool_call([tool("f", parameters)]),
    ):
        with pytest.raises(InvalidParameterError, match=r"in const or enum; .* at most 9007199254"):
            compiler_of(chatglm3_tiny).compile(grammar)


def test_the_greatest_exact_integer(allows: Allows) -> None:
    assert allows({"const": 2**53}, "9007199254740992")
    assert allows({"enum": [-(2**53)]}, "-9007199254740992")


@pytest.mark.parametrize("pointer", ["#/examples/0", "#/%64efault"])
def test_a_reference_to_what_is_no_schema(chatglm3_tiny: ChatTokenizer, pointer: str) -> None:
    """llguidance would read it without what is prepared for it, and end the process."""
    least = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}
    grammar = Grammar.json_schema({"$ref": pointer, "examples": [least], "default": least})
    with pytest.raises(InvalidParameterError, match="cannot be served"):
        compiler_of(chatglm3_tiny).compile(grammar)


def test_a_definition_named_default(allows: Allows) -> None:
    bounds = {"type": "integer", "minimum": -(2**63), "maximum": -(2**62)}
    schema = {"$ref": "#/components/default", "components": {"default": bounds}}
    assert allows(schema, "-9000000000000000001")
    assert not allows(schema, "-1")
