"""What the bodies of several protocols have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import BaseModel, Field

ROUNDS_MAX = 1024

Temperature = Annotated[
    Optional[float], Field(ge=0, le=100, description="0 takes the likeliest token each time.")
]
TopP = Annotated[Optional[float], Field(gt=0, le=1)]
MaxTokens = Annotated[Optional[int], Field(ge=1, description="Tokens of the answer.")]
MaxLength = Annotated[
    Optional[int], Field(ge=1, description="Tokens of prompt and answer together.")
]
Seed = Annotated[
    Optional[int],
    # Descriptions write limits as floats, which are exact up to here.
    Field(ge=0, lt=2**63, json_schema_extra={"maximum": 2**53 - 1}),
]


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


History = Annotated[list[Union[tuple[str, str], Message]], Field(max_length=ROUNDS_MAX)]
"""Earlier rounds: [question, answer] pairs or messages."""


def problem_of(problem: Mapping[str, Any], place: Sequence[Any]) -> tuple[Optional[str], str]:
    """-> the field that is wrong, and a message that names it, from pydantic's description.

    Args:
        problem: one of `ValidationError.errors()`.
        place: where the field is.
    """
    # Of JSON that is none, the place is a position.
    parts = [] if problem.get("type") == "json_invalid" else place
    field = ".".join(map(str, parts)) or None
    if problem.get("type") == "extra_forbidden":
        return field, f"{field}: there is no such field here"
    given = problem.get("input")
    shown = f", not {_shown(given)}" if field and not isinstance(given, dict) else ""
    return field, f"{field or 'body'}: {problem.get('msg', 'invalid')}{shown}"


def with_round(
    history: Sequence[Union[tuple[str, str], Message]], prompt: str, answer: str
) -> list[Union[tuple[str, str], Message]]:
    """The history with one more round, in the form that it has."""
    if any(isinstance(item, Message) for item in history):
        question = Message(role="user", content=prompt)
        return [*history, question, Message(role="assistant", content=answer)]
    return [*history, (prompt, answer)]


def as_history(items: Sequence[Union[tuple[str, str], Message]]) -> list[Any]:
    """As `MultiUserLLM.submit` takes it."""
    return [item.model_dump() if isinstance(item, Message) else item for item in items]


def _shown(value: object, longest: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= longest else text[:longest] + "..."
