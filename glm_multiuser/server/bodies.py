"""Models and field types shared by several protocols."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from glm_multiuser.errors import shown
from glm_multiuser.server.keys import SESSION_LENGTH_MAX

ROUNDS_MAX = 1024
UNION_MEMBER = re.compile(r"[a-z-]+\[.*\]")
"""A type that pydantic adds to the location of an error inside a union: "list[int]"."""
FIELDS_MAX = 256
"""Fields of one object. Each unknown one would be an error, which takes ten microseconds of the
event loop."""
ONE_OF = "one_of"
"""Error type for an object whose `type` is unknown."""


def type_tag(name: str) -> Tag:
    """Returns the tag of a union's member, which errors do not show."""
    return Tag(f"type[{name}]")


def _with_few_fields(given: object, limit: int) -> object:
    if isinstance(given, dict) and len(given) > limit:
        raise PydanticCustomError(
            "too_many_fields",
            "An object may have at most {limit} fields, not {number}",
            {"limit": limit, "number": len(given)},
        )
    return given


def few_fields(limit: int = FIELDS_MAX) -> BeforeValidator:
    """For an object of any names: rejects more fields than this before their values are checked."""
    return BeforeValidator(lambda given: _with_few_fields(given, limit))


class Strict(BaseModel):
    """Rejects unknown fields and values of the wrong type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, given: object) -> object:
        return _with_few_fields(given, FIELDS_MAX)


class Lenient(BaseModel):
    """Ignores unknown fields, because clients send back messages and their parts with more fields.

    Values of the wrong type are rejected.
    """

    model_config = ConfigDict(extra="ignore", strict=True)


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "Input should be a number")
    return value


NotBoolean = BeforeValidator(_not_boolean)
"""For numbers: rejects true and false, which pydantic accepts unless it is strict."""

Item = TypeVar("Item")
LongList = Annotated[list[Item], Field(fail_fast=True)]
"""A list without a maximum length. Validation ends at its first invalid item: clients see one
error, and each takes ten microseconds of the event loop."""

Temperature = Annotated[
    Optional[float],
    Field(ge=0, le=100, description="0: greedy decoding."),
    NotBoolean,
]
TopP = Annotated[Optional[float], Field(gt=0, le=1), NotBoolean]
MaxTokens = Annotated[Optional[int], Field(ge=1, description="Maximum new tokens."), NotBoolean]
MaxLength = Annotated[
    Optional[int], Field(ge=1, description="Maximum prompt plus answer tokens."), NotBoolean
]
Seed = Annotated[
    Optional[int],
    # OpenAPI descriptions write limits as floats, which are exact up to here.
    Field(ge=0, lt=2**63, json_schema_extra={"maximum": 2**53 - 1}),
    NotBoolean,
]

SessionName = Annotated[
    Optional[str],
    Field(
        description="Session name; its requests share a slot.",
        json_schema_extra={"maxLength": SESSION_LENGTH_MAX},
    ),
]


class HistoryMessage(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


def _history_tag(item: object) -> Optional[str]:
    """Chooses the type by the item's form, so that an error names what is wrong inside it."""
    if isinstance(item, (list, tuple)):
        return PAIR.tag
    return MESSAGE.tag if isinstance(item, (dict, HistoryMessage)) else None


PAIR, MESSAGE = type_tag("pair"), type_tag("message")
HistoryItem = Annotated[
    Union[Annotated[tuple[str, str], PAIR], Annotated[HistoryMessage, MESSAGE]],
    Discriminator(
        _history_tag,
        custom_error_type=ONE_OF,
        custom_error_message="must be a [question, answer] pair or a message",
    ),
]
History = Annotated[list[HistoryItem], Field(max_length=ROUNDS_MAX)]
"""Earlier rounds: [question, answer] pairs or messages."""


def problem_of(problem: Mapping[str, Any], place: Sequence[Any]) -> tuple[Optional[str], str]:
    """Returns the invalid field, and a message that names it, from a pydantic error.

    Args:
        problem: one of `ValidationError.errors()`.
        place: location of the field.
    """
    parts = [*map(str, place)]
    if problem.get("type") == "extra_forbidden":
        unknown = ".".join([*_without_types(parts[:-1]), *parts[-1:]])
        return unknown, f"{unknown}: unknown field"
    field = ".".join(_without_types(parts)) or None
    given = problem.get("input")
    if problem.get("type") == ONE_OF and isinstance(given, dict):
        given = given.get("type")
    instead = f", not {shown(given)}" if field and not isinstance(given, dict) else ""
    return field, f"{field or 'body'}: {problem.get('msg', 'invalid')}{instead}"


def _without_types(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if not UNION_MEMBER.fullmatch(part)]


def with_round(history: Sequence[HistoryItem], prompt: str, answer: str) -> list[HistoryItem]:
    """Returns the history with one more round, in the same format."""
    if any(isinstance(item, HistoryMessage) for item in history):
        question = HistoryMessage(role="user", content=prompt)
        return [*history, question, HistoryMessage(role="assistant", content=answer)]
    return [*history, (prompt, answer)]


def as_history(items: Sequence[HistoryItem]) -> list[Any]:
    """Returns the history in the format of `MultiUserLLM.submit`."""
    return [item.model_dump() if isinstance(item, HistoryMessage) else item for item in items]
