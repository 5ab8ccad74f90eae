"""Discriminated unions of pydantic, whose discriminator often has a default."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Optional, Union

import jsonschema
import pytest
from pydantic import BaseModel, Field

from glm_multiuser.grammar import Grammar
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
