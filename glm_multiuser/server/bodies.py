"""What the bodies of several protocols have in common."""

from __future__ import annotations

from collections.abc import Sequence
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
