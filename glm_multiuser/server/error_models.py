"""Schemas of error responses, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

from pydantic import BaseModel

MEANINGS = {
    400: "A field is wrong; the message names it, its value and the limit.",
    401: "No API key, or a wrong one.",
    403: "A page of another origin that is not allowed, or a call that needs another key.",
    404: "No such model, or stored response.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    414: "The URL is too long.",
    421: "The header Host names another host.",
    429: "Over capacity: too many requests run or wait. See the header Retry-After.",
    431: "The headers are too large.",
    500: "This request failed; others are not affected.",
    503: "The server or the model is starting or shutting down. See the header Retry-After.",
    504: "The request's deadline has passed.",
}


class PlainError(BaseModel):
    """An error message, and a machine-readable code."""

    error: str
    code: str


class OpenAIError(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: Optional[str]
    code: Optional[str]


class OpenAIErrorBody(BaseModel):
    """The body of OpenAI's error responses."""

    error: OpenAIError


class AnthropicError(BaseModel):
    """Anthropic's error object, with a machine-readable code."""

    type: str
    message: str
    code: str


class AnthropicErrorBody(BaseModel):
    """The body of Anthropic's error responses."""

    type: Literal["error"]
    error: AnthropicError


def _documented(body: type[BaseModel]) -> dict[Union[int, str], dict[str, Any]]:
    return {status: {"description": text, "model": body} for status, text in MEANINGS.items()}


ERRORS = _documented(PlainError)
OPENAI_ERRORS = _documented(OpenAIErrorBody)
ANTHROPIC_ERRORS = _documented(AnthropicErrorBody)
