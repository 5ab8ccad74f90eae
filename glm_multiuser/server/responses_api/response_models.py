"""Response schemas for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Optional

from pydantic import BaseModel


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseCard(BaseModel):
    """An answer: items of type message and function_call. Other fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: Optional[dict[str, str]]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


class DeletedResponse(BaseModel):
    """A deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
