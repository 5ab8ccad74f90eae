"""What constrains nothing is accepted, such as a "format" that JSON Schema does not define."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field, SecretStr

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import Answer, compiler_of, tool, walk


class File(BaseModel, extra="forbid"):
    path: Path = Field(json_schema_extra={"maxLength": 9})
    format: Optional[str] = Field(max_length=5)
    keys: list[Annotated[SecretStr, Field(max_length=9)]] = Field(max_length=2)


@pytest.fixture(scope="module")
def compiler(chatglm3_tiny: ChatTokenizer) -> GrammarCompiler:
    return compiler_of(chatglm3_tiny)


def without_formats(schema: dict[str, Any]) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(
        json.dumps(schema).replace('"format": "path"', '"title": "p"')
    )
    return written


@pytest.mark.parametrize("seed", range(4))
def test_a_model_of_pydantic(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer, seed: int
) -> None:
    schema = File.model_json_schema()
    assert schema["properties"]["path"]["format"] == "path"
    answer = walk(compiler, chatglm3_tiny, Grammar.json_schema(schema), seed)
    assert answer.complete
    assert len(str(File.model_validate_json(answer.text).path)) <= 9


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "path", "maxLength": 9},
        {"anyOf": [{"type": "string", "format": "path", "maxLength": 9}, {"type": "null"}]},
        {
            "$defs": {"format": {"type": "string", "format": "path", "maxLength": 9}},
            "type": "array",
            "items": {"$ref": "#/$defs/format"},
            "maxItems": 3,
        },
    ],
)
def test_the_answer_is_the_one_without_it(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer, schema: dict[str, Any]
) -> None:
    def answer(one: dict[str, Any]) -> Answer:
        return walk(compiler, chatglm3_tiny, Grammar.json_schema(one), 3)

    assert answer(schema) == answer(without_formats(schema))


def test_names_of_properties_that_may_be_any(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer
) -> None:
    record = {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2}
    named = {**record, "propertyNames": {"type": "string"}}
    answers = [
        walk(compiler, chatglm3_tiny, Grammar.json_schema(one), 3) for one in (record, named)
    ]
    assert answers[0] == answers[1]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Palette(BaseModel, extra="forbid"):
    amounts: dict[Colour, Annotated[int, Field(ge=0, le=9)]]
    marks: dict[Literal["a", "b", "c"], bool]
    single: dict[Literal["only"], None]


@pytest.mark.parametrize("seed", range(4))
def test_names_of_properties_that_are_listed(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer, seed: int
) -> None:
    schema = Palette.model_json_schema()
    assert "propertyNames" in schema["properties"]["amounts"]
    answer = walk(compiler, chatglm3_tiny, Grammar.json_schema(schema), seed)
    assert answer.complete
    Palette.model_validate_json(answer.text)


@pytest.mark.parametrize(
    "names",
    [
        {"pattern": "^a"},
        {"enum": ["a", 1]},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#/$defs/itself"},
        {"enum": ["a"], "minLength": 1},
    ],
)
def test_names_of_properties_that_are_not_listed_are_rejected(
    compiler: GrammarCompiler, names: dict[str, Any]
) -> None:
    schema = {
        "$defs": {"itself": {"$ref": "#/$defs/itself"}},
        "type": "object",
        "propertyNames": names,
    }
    with pytest.raises(InvalidParameterError, match="propertyNames"):
        compiler.compile(Grammar.json_schema(schema))


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft/2020-12/schema",
        "https://spec.openapis.org/oas/3.1/dialect/base",
    ],
)
def test_dialects_that_llguidance_does_not_know(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer, dialect: str
) -> None:
    inner = {"type": "string", "maxLength": 5}
    schema = {"type": "array", "items": inner, "maxItems": 2}
    named = {"$schema": dialect, **schema, "items": {"$schema": dialect, **inner}}
    answers = [
        walk(compiler, chatglm3_tiny, Grammar.json_schema(one), 3) for one in (schema, named)
    ]
    assert answers[0] == answers[1]


def test_a_known_dialect_is_kept(compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer) -> None:
    # Draft 7 has no prefixItems.
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "items": {"enum": [1]},
        "minItems": 1,
        "maxItems": 1,
    }
    assert walk(compiler, chatglm3_tiny, Grammar.json_schema(schema), 3).text == "[1]"


def test_it_may_be_in_a_tool(compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer) -> None:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "format": "path", "maxLength": 9}},
        "required": ["path"],
        "additionalProperties": False,
    }
    tools = [tool("read", parameters)]
    grammar = Grammar.tool_call(tools, required=True)
    answer = walk(compiler, chatglm3_tiny, grammar, 5, tools)
    assert set(json.loads(answer.calls[0].arguments)) == {"path"}


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_values_keep_what_is_called_format(
    compiler: GrammarCompiler, chatglm3_tiny: ChatTokenizer, keyword: str
) -> None:
    value = {"format": "path"}
    schema = {keyword: value if keyword == "const" else [value]}
    answer = walk(compiler, chatglm3_tiny, Grammar.json_schema(schema), 7)
    assert json.loads(answer.text) == value
