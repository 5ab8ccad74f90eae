"""Bounds of numbers that llguidance reads in another way than JSON Schema."""

from __future__ import annotations

import json
from typing import Any, Callable

import jsonschema
import pytest

from glm_multiuser.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import compiler_of

ZEROS = ("0", "-0", "0.0", "-0.0")
VALUES = (*ZEROS, "0.5", "-0.5", "0.25", "-0.25", "0.001", "3", "3.0", "3.1", "-3", "-3.1")


@pytest.fixture(scope="module")
def allows(chatglm3_tiny: ChatTokenizer) -> Callable[[Any, str], bool]:
    """Whether an answer of a schema may be this text."""
    compiler = compiler_of(chatglm3_tiny)

    def allowed(schema: Any, text: str) -> bool:
        matcher = compiler.compile(Grammar.json_schema(schema))
        for token_id in chatglm3_tiny.encode_inside(chatglm3_tiny.content_header() + text):
            if not matcher.allowed()[token_id]:
                return False
            matcher.accept(token_id)
        return matcher.complete or bool(matcher.allowed()[list(chatglm3_tiny.stop_token_ids)].any())

    return allowed


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
def test_exclusive_bounds(
    allows: Callable[[Any, str], bool], bounds: dict[str, float], inside: list[str]
) -> None:
    schema = {"type": "number", **bounds}
    allowed = [text for text in VALUES if allows(schema, text)]
    assert set(inside) <= set(allowed)
    for text in allowed:
        jsonschema.validate(json.loads(text), schema)
