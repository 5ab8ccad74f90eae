"""Messages and tools in chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from glm_multiuser.server.bodies import Lenient, LongList, Strict
from glm_multiuser.server.openai.fields import Hint, Only, OptionalContent

TOOLS_MAX = 128


class CalledFunction(Lenient):
    """The called function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class CalledTool(Lenient):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Lenient):
    """A message of a conversation; the role developer is the same as system.

    Only an assistant message with `tool_calls` may omit its content. Fields that models never see
    (`name`, `refusal`, `reasoning_content`, those that clients add) are ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Optional[LongList[CalledTool]] = Field(None, description="Assistant only.")
    tool_call_id: Optional[str] = Field(
        None, validate_default=True, description="Tool only: the call this is the result of."
    )
    content: OptionalContent = Field(None, validate_default=True)

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None

    @field_validator("tool_calls")
    @classmethod
    def _of_an_assistant(cls, calls: Any, info: ValidationInfo) -> Any:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("tool_calls", "is allowed in an assistant's message only")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_tool(cls, call_id: Any, info: ValidationInfo) -> Any:
        if (call_id is None) == (info.data.get("role") == "tool"):
            raise PydanticCustomError(
                "tool_call_id", "is required in messages of role 'tool', and allowed in no other"
            )
        return call_id

    @field_validator("content")
    @classmethod
    def _or_calls(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError(
                "content",
                "must be a text or a list of text parts; only an assistant's message with "
                "tool_calls can be without",
            )
        return content


class CachedPart(Strict):
    """Base class of a tool and its function: LiteLLM leaves Anthropic's cache marker in either."""

    cache_control: Hint[dict[str, Any]] = None


class ToolFunction(CachedPart):
    """A function that the model may call; with `strict`, arguments always fit `parameters`."""

    name: str
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = Field(None, description="A JSON schema.")
    strict: Optional[bool] = None


class Tool(CachedPart):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction

    def offered(self) -> dict[str, Any]:
        """Returns the tool for the library: the given fields that affect answers."""
        function = self.function
        given = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return {"type": self.type, "function": named}
