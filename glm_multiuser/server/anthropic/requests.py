"""Request bodies of Anthropic's Messages API.

Unimplemented fields that would change the answer are accepted at values without effect, and
rejected otherwise, as in `openai.requests`. A `Hint` concerns effort, caching or accounting, and
may be ignored by a model without that feature.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from glm_multiuser.sampling_params import STOP_MAX
from glm_multiuser.server.bodies import ROUNDS_MAX, Lenient, LongList, SessionName, Strict, type_tag
from glm_multiuser.server.openai.adapter import KEEPS_ALL, RUNS_NO_TOOL, CommonFields, DescribedTool
from glm_multiuser.server.openai.fields import (
    Hint,
    Only,
    OrText,
    StopText,
    one_of,
)
from glm_multiuser.server.openai.messages import TOOLS_MAX


class CachedBlock(Lenient):
    """Base class of blocks."""

    cache_control: Hint[dict[str, Any]] = None


class TextBlock(CachedBlock):
    """A text."""

    type: Literal["text"]
    text: str


Texts = Annotated[LongList[TextBlock], OrText(lambda text: {"type": "text", "text": text})]


class ToolUseBlock(CachedBlock):
    """A tool call, in an assistant message."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(CachedBlock):
    """The result of a call, in a user message. Models do not see `is_error`."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Optional[Texts] = None
    is_error: Hint[bool] = None


class ThinkingBlock(Lenient):
    """Thinking of another model; ignored."""

    type: Literal["thinking"]


class RedactedThinkingBlock(Lenient):
    """Encrypted thinking of another model; ignored."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Union[
        Annotated[TextBlock, type_tag("text")],
        Annotated[ToolUseBlock, type_tag("tool_use")],
        Annotated[ToolResultBlock, type_tag("tool_result")],
        Annotated[ThinkingBlock, type_tag("thinking")],
        Annotated[RedactedThinkingBlock, type_tag("redacted_thinking")],
    ],
    one_of(
        "this server reads no images, documents or results of server tools; it must be a block of "
        "type text, tool_use, tool_result or thinking"
    ),
]


class Message(Lenient):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        LongList[Block],
        OrText(lambda text: {"type": "text", "text": text}),
    ]


class Tool(DescribedTool):
    """A tool that the model may call."""

    type: Annotated[Any, Only("custom", why=RUNS_NO_TOOL)] = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")

    cache_control: Hint[dict[str, Any]] = None
    eager_input_streaming: Hint[bool] = None
    input_examples: Hint[LongList[dict[str, Any]]] = None


class ToolChoice(Strict):
    """Which tools to call: as the model decides, at least one, a named one, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: Optional[str] = Field(None, validate_default=True, description="For `tool`.")
    disable_parallel_tool_use: Optional[bool] = None

    @field_validator("name")
    @classmethod
    def _of_a_tool(cls, name: Any, info: Any) -> Any:
        if (name is not None) != (info.data.get("type") == "tool"):
            raise PydanticCustomError("name", "is required for type 'tool', and for no other")
        return name


class Thinking(Strict):
    """Has no effect, because models here have no separate thinking."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Hint[int] = None
    display: Hint[str] = None


class OutputFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="A JSON schema.")


class OutputConfig(Strict):
    """The format of the answer."""

    format: Optional[OutputFormat] = None
    effort: Hint[str] = None
    task_budget: Hint[dict[str, Any]] = None


class ContextEdit(Lenient):
    """An edit of the conversation. Thinking is always cleared: it never enters the prompt."""

    type: Annotated[Any, Only("clear_thinking_20251015", why=KEEPS_ALL)]


class ContextManagement(Strict):
    """Edits of the conversation before it is answered."""

    edits: Optional[LongList[ContextEdit]] = None


class Metadata(Strict):
    """About the request."""

    user_id: SessionName = None


class CountTokensRequest(Strict):
    """A conversation."""

    model: Optional[str] = Field(None, description="null: the server's first model.")
    messages: list[Message] = Field(min_length=1, max_length=ROUNDS_MAX)
    system: Optional[Texts] = None
    tools: Optional[list[Tool]] = Field(None, max_length=TOOLS_MAX)
    tool_choice: Optional[ToolChoice] = None
    thinking: Optional[Thinking] = None
    output_config: Optional[OutputConfig] = None

    context_management: Optional[ContextManagement] = None

    mcp_servers: Annotated[Any, Only([], why=RUNS_NO_TOOL)] = None

    betas: Hint[LongList[str]] = None
    cache_control: Hint[dict[str, Any]] = None
    speed: Hint[str] = None


class MessagesRequest(CountTokensRequest, CommonFields):
    """A conversation to answer; if its last message is an assistant's, it is continued."""

    max_tokens: int = Field(ge=1, description="Maximum new tokens.")
    stop_sequences: Optional[list[StopText]] = Field(None, max_length=STOP_MAX)
    metadata: Optional[Metadata] = None

    thread: Optional[dict[str, Any]] = Field(None, description="Rejected: nothing is stored.")
    container: Annotated[Any, Only()] = None
    diagnostics: Hint[dict[str, Any]] = None
    inference_geo: Hint[str] = None
