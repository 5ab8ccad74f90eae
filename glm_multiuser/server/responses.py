"""The answers to bad requests, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Optional, Union

from pydantic import BaseModel

MEANINGS = {
    400: "A field is wrong; the message names it, its value and the limit.",
    401: "No API key, or a wrong one.",
    403: "A page of another origin.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests run or wait; nothing was lost. See the header Retry-After.",
    500: "This request failed; others did not notice.",
    503: "The server or the model is starting or ending. See the header Retry-After.",
    504: "The request's deadline has passed.",
}


class PlainError(BaseModel):
    """What went wrong, for people and for programs."""

    error: str
    code: str


class OpenAIError(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: Optional[str]
    code: Optional[str]


class OpenAIErrorBody(BaseModel):
    """How OpenAI's API answers to a bad request."""

    error: OpenAIError


def _documented(body: type[BaseModel]) -> dict[Union[int, str], dict[str, Any]]:
    return {status: {"description": text, "model": body} for status, text in MEANINGS.items()}


ERRORS = _documented(PlainError)
OPENAI_ERRORS = _documented(OpenAIErrorBody)
