"""Discriminated unions of pydantic, whose discriminator often has a default."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema
import pytest
from pydantic import BaseModel, Field

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from tests.structured.walking import compiler_of, walk


class Circle(BaseModel, extra="forbid"):
    kind: Literal["circle"] = "circle"
    radius: int = Field(ge=0, le=9)


class Text(BaseModel, extra="forbid"):
    text: str = Field(max_length=5)
    kind: Literal["text", "label"] = "text"


class Mark(BaseModel, extra="forbid"):
    kind: Literal["mark"] = "mark"


Shape = Annotated[Union[Circle, Text, Mark], Field(discriminator="kind")]


class Drawing(BaseModel, extra="forbid"):
    shapes: list[Shape] = Field(min_length=1, max_length=3)


@pytest.mark.parametrize("dialect", [None, "http://json-schema.org/draft-07/schema#"])
def test_every_answer_is_read(chatglm3_tiny: ChatTokenizer, dialect: Optional[str]) -> None:
    schema = Drawing.model_json_schema()
    assert "kind" not in schema["$defs"]["Circle"]["required"]
    grammar = Grammar.json_schema({"$schema": dialect, **schema} if dialect else schema)
    compiler = compiler_of(chatglm3_tiny)
    kinds = set()
    for seed in range(6):
        answer = walk(compiler, chatglm3_tiny, grammar, seed)
        assert answer.complete
        jsonschema.validate(json.loads(answer.text), schema)
        kinds |= {type(one) for one in Drawing.model_validate_json(answer.text).shapes}
    assert kinds == {Circle, Text, Mark}


class Leaf(BaseModel, extra="forbid"):
    kind: Literal["leaf"] = "leaf"
    depth: Literal[1] = 1


class Tree(BaseModel, extra="forbid"):
    kind: Literal["tree"] = "tree"
    depth: Literal[2] = 2
    children: list[Annotated[Union[Tree, Leaf], Field(discriminator="kind")]] = Field(max_length=2)
    other: Optional[Tree] = Field(None, deprecated=True)


class Versions(BaseModel, extra="forbid"):
    all: list[Annotated[Union[Tree, Leaf], Field(discriminator="depth")]] = Field(max_length=2)


@pytest.mark.parametrize("model", [Tree, Versions])
def test_cases_that_are_recursive_or_numbered(
    chatglm3_tiny: ChatTokenizer, model: type[BaseModel]
) -> None:
    schema = model.model_json_schema()
    compiler, grammar = compiler_of(chatglm3_tiny), Grammar.json_schema(schema)
    answers = [walk(compiler, chatglm3_tiny, grammar, seed) for seed in range(12)]
    complete = [json.loads(one.text) for one in answers if one.complete]
    for value in complete:
        jsonschema.validate(value, schema)
        model.model_validate(value)
    assert len(complete) >= 3


@pytest.mark.parametrize("tag", [{"const": 1}, {"enum": ["a", "b"]}, {"type": "string"}, {}])
def test_cases_whose_tags_may_be_equal_stay_exclusive(
    chatglm3_tiny: ChatTokenizer, tag: dict[str, Any]
) -> None:
    case = {"type": "object", "properties": {"kind": tag}, "additionalProperties": False}
    union = {"oneOf": [case, case], "discriminator": {"propertyName": "kind"}}
    with pytest.raises(InvalidParameterError, match="grammar"):
        compiler_of(chatglm3_tiny).compile(Grammar.json_schema(union))


@pytest.mark.parametrize("kind", [{}, {"type": ["object", "null"]}])
def test_cases_that_are_no_objects_stay_exclusive(
    chatglm3_tiny: ChatTokenizer, kind: dict[str, Any]
) -> None:
    """A number fits both."""
    cases = [
        {**kind, "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"
    ]
    union = {"oneOf": cases, "discriminator": {"propertyName": "kind"}}
    with pytest.raises(InvalidParameterError, match="oneOf constraints are not supported"):
        compiler_of(chatglm3_tiny).compile(Grammar.json_schema(union))
