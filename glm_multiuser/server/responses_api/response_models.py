"""The shapes of answers, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Optional

from pydantic import BaseModel


class ResponseUsage(BaseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseCard(BaseModel):
    """An answer: items of type message and function_call. Its other fields were asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: Optional[dict[str, str]]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class DeletedResponse(BaseModel):
    """A response that is stored no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    """How long a prompt is."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
