"""Response schemas for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

from pydantic import BaseModel


class TextContent(BaseModel):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseContent(BaseModel):
    """A tool call; the block with its result refers to its id."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Token counts; `input_tokens` does not include cached prompt tokens."""

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
    """The number of tokens of a prompt."""

    input_tokens: int
