"""The bodies of requests of Anthropic's Messages API.

Fields that would change the answer and are not implemented are accepted at the value that changes
nothing, and rejected otherwise, as for `openai.requests`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from glm_multiuser.sampling import STOP_MAX
from glm_multiuser.server.bodies import ROUNDS_MAX
from glm_multiuser.server.keys import SESSION_LENGTH_MAX
from glm_multiuser.server.openai.adapter import RUNS_NO_TOOL, SamplingFields
from glm_multiuser.server.openai.fields import (
    Lenient,
    NoEffect,
    Only,
    OrText,
    StopText,
    Strict,
    one_of,
)
from glm_multiuser.server.openai.messages import TOOLS_MAX


class TextBlock(Lenient):
    """A text."""

    type: Literal["text"]
    text: str


Texts = Annotated[list[TextBlock], OrText(lambda text: {"type": "text", "text": text})]


class ToolUseBlock(Lenient):
    """A call, of an assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    """What a call returned, of a user. Models do not see `is_error`."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Optional[Texts] = None


class ThinkingBlock(Lenient):
    """What another model thought; ignored."""

    type: Literal["thinking"]


class RedactedThinkingBlock(Lenient):
    """The same, encrypted."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Union[
        Annotated[TextBlock, Tag("text")],
        Annotated[ToolUseBlock, Tag("tool_use")],
        Annotated[ToolResultBlock, Tag("tool_result")],
        Annotated[ThinkingBlock, Tag("thinking")],
        Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    ],
    one_of(
        "must be a block of type text, tool_use, tool_result or thinking; this server reads no "
        "images, documents or results of its own tools"
    ),
]


class Message(Lenient):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        OrText(lambda text: {"type": "text", "text": text}),
    ]


class Tool(Strict):
    """What the model may call."""

    name: str
    description: Optional[str] = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: Optional[bool] = None
    type: Annotated[Any, Only("custom", why=RUNS_NO_TOOL)] = None

    allowed_callers: NoEffect = None
    cache_control: NoEffect = None
    defer_loading: NoEffect = None
    eager_input_streaming: NoEffect = None
    input_examples: NoEffect = None


class ToolChoice(Strict):
    """Whether tools are called: as the model decides, at least one, one by its name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: Optional[str] = Field(None, validate_default=True, description="Of `tool`.")
    disable_parallel_tool_use: Optional[bool] = None

    @field_validator("name")
    @classmethod
    def _of_a_tool(cls, name: Any, info: Any) -> Any:
        if (name is not None) != (info.data.get("type") == "tool"):
            raise PydanticCustomError("name", "is required for type 'tool', and for no other")
        return name


class Thinking(Strict):
    """Models that do not think have nothing to disable, and adapt by not thinking."""

    type: Annotated[
        Any, Only("disabled", "adaptive", why="is not possible: this server's models do not think")
    ]
    display: NoEffect = None


class OutputConfig(Strict):
    """The form of the answer."""

    format: Optional[dict[str, Any]] = Field(None, description="A JSON schema.")
    effort: Annotated[Any, Only("high")] = None


class Metadata(Strict):
    """About the request."""

    user_id: Optional[str] = Field(
        None,
        description="Names a session, whose answers share a slot.",
        json_schema_extra={"maxLength": SESSION_LENGTH_MAX},
    )


class CountTokensRequest(Strict):
    """A conversation."""

    model: Optional[str] = Field(None, description="null: the first model of the server.")
    messages: list[Message] = Field(min_length=1, max_length=ROUNDS_MAX)
    system: Optional[Texts] = None
    tools: Optional[list[Tool]] = Field(None, max_length=TOOLS_MAX)
    tool_choice: Optional[ToolChoice] = None
    thinking: Optional[Thinking] = None
    output_config: Optional[OutputConfig] = None

    context_management: Annotated[Any, Only()] = None
    mcp_servers: Annotated[Any, Only([])] = None
    speed: Annotated[Any, Only("standard")] = None
    cache_control: NoEffect = None


class MessagesRequest(CountTokensRequest, SamplingFields):
    """A conversation whose last message is to be answered, or continued if it is an assistant's."""

    max_tokens: int = Field(ge=1, description="Tokens of the answer.")
    stream: Optional[bool] = None
    stop_sequences: Optional[list[StopText]] = Field(None, max_length=STOP_MAX)
    metadata: Optional[Metadata] = None

    container: Annotated[Any, Only()] = None
    diagnostics: NoEffect = None
    inference_geo: NoEffect = None
    service_tier: NoEffect = None
