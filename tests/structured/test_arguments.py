"""Arguments of forced and strict calls are an object, whatever else their schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import compiler_of, tool, walk

CITY = {"type": "string", "maxLength": 5}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
        {"type": ["object", "null"], "properties": {"city": CITY}, "additionalProperties": False},
        {
            "anyOf": [
                {"type": "object", "properties": {"a": CITY}, "additionalProperties": False},
                {"type": "null"},
            ]
        },
    ],
)
def test_they_are_an_object(
    chatglm3_tiny: ChatTokenizer, parameters: dict[str, Any], seed: int
) -> None:
    tools = [tool("f", parameters)]
    compiler = compiler_of(chatglm3_tiny)
    answer = walk(compiler, chatglm3_tiny, Grammar.tool_call(tools), seed, tools)
    assert answer.complete
    assert isinstance(json.loads(answer.calls[0].arguments), dict)
