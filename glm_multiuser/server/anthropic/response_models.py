"""The shapes of answers, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

from pydantic import BaseModel


class TextContent(BaseModel):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseContent(BaseModel):
    """A call; the block with its result names its id."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Counts of tokens; those of the prompt that were cached are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageCard(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Union[TextContent, ToolUseContent]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: Optional[str]
    usage: MessageUsage


class TokenCount(BaseModel):
    """How many tokens a prompt has."""

    input_tokens: int
