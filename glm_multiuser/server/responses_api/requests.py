"""Request bodies of `/v1/responses`.

Unimplemented fields that would change the answer are accepted at values without effect, and
rejected otherwise, as in `openai.requests`. A `Hint` concerns effort, caching or accounting, and
may be ignored by a model without that feature.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from glm_multiuser.server.bodies import (
    ROUNDS_MAX,
    Lenient,
    LongList,
    MaxTokens,
    SessionName,
    Strict,
    few_fields,
    type_tag,
)
from glm_multiuser.server.openai.adapter import KEEPS_ALL, CommonFields
from glm_multiuser.server.openai.fields import (
    Hint,
    Only,
    OrText,
    Stop,
    ValidJSON,
)
from glm_multiuser.server.openai.messages import TOOLS_MAX
from glm_multiuser.server.openai.requests import LogprobsCount
from glm_multiuser.server.openai.structured import CHOICE_TYPES, CallMode
from glm_multiuser.server.responses_api.items import InputItem
from glm_multiuser.server.responses_api.tools import Tool

LOGPROBS = "message.output_text.logprobs"
STORE_WHY = "is not implemented: responses are kept with `store` and a session only"


class NamedFunction(Strict):
    """The function to call."""

    type: Literal["function"]
    name: str

    def as_chat(self) -> dict[str, Any]:
        """Returns the `tool_choice` of a chat."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Strict):
    """The only functions that may be called; with mode required, one must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: LongList[NamedFunction]

    def as_chat(self) -> dict[str, Any]:
        """Returns the `tool_choice` of a chat."""
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}


class TextFormat(Strict):
    """The format of the answer's text. `schema` of a json_object is as in the chat."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Optional[str], ValidJSON] = None
    description: Annotated[Optional[str], ValidJSON] = None
    json_schema: Annotated[Optional[dict[str, Any]], ValidJSON] = Field(None, alias="schema")
    strict: Optional[bool] = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == ("json_schema" if self.json_schema is None else "text"):
            raise PydanticCustomError(
                "schema", "schema is required with type 'json_schema', and not allowed with 'text'"
            )
        return self


class TextConfig(Strict):
    """Options of the answer's text."""

    format: Optional[TextFormat] = None
    verbosity: Hint[str] = None


class Reasoning(Strict):
    """Has no effect, because models here have no separate reasoning."""

    effort: Hint[str] = None
    context: Hint[str] = None
    generate_summary: Hint[str] = None
    mode: Hint[str] = None
    summary: Hint[str] = None


class PromptCacheOptions(Lenient):
    """Only `prewarm`, which omits the answer, would make a difference."""

    prewarm: Annotated[Any, Only(False)] = None


ToolChoice = Annotated[
    Union[
        CallMode,
        Annotated[NamedFunction, type_tag("function")],
        Annotated[AllowedTools, type_tag("allowed_tools")],
    ],
    CHOICE_TYPES,
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    few_fields(16),
]
Texts = Annotated[dict[str, str], few_fields()]


class ResponseRequest(CommonFields):
    """A conversation to answer."""

    model: Optional[str] = Field(None, description="null: the server's first model.")
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=ROUNDS_MAX),
        OrText(lambda text: {"role": "user", "content": text}),
    ]
    instructions: Optional[str] = None
    max_output_tokens: MaxTokens = None
    tools: Optional[list[Tool]] = Field(None, max_length=TOOLS_MAX)
    tool_choice: Optional[ToolChoice] = None
    parallel_tool_calls: Optional[bool] = None
    text: Optional[TextConfig] = None
    reasoning: Optional[Reasoning] = None
    include: Optional[LongList[str]] = Field(None, description=f"{LOGPROBS}; others are ignored.")
    top_logprobs: LogprobsCount = Field(
        None, description=f"Without effect unless `include` has {LOGPROBS}."
    )
    metadata: Optional[Metadata] = None
    store: Optional[bool] = Field(None, description="Needs a session; default: false.")
    previous_response_id: Optional[str] = Field(None, description="Stored in the same session.")
    user: Annotated[SessionName, ValidJSON] = None

    stop: Stop = Field(default_factory=list)

    background: Annotated[Any, Only(False, why=STORE_WHY)] = None
    context_management: Annotated[Any, Only([])] = None
    conversation: Annotated[Any, Only(why=STORE_WHY)] = None
    moderation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only(why=STORE_WHY)] = None
    truncation: Annotated[Any, Only("disabled", why=KEEPS_ALL)] = None

    access_programs: Hint[Texts] = None
    client_metadata: Hint[Texts] = None
    image: Hint[dict[str, Any]] = None
    max_tool_calls: Hint[int] = None
    prompt_cache_key: Hint[str] = None
    prompt_cache_options: Optional[PromptCacheOptions] = None
    prompt_cache_retention: Hint[str] = None
    safety_identifier: Hint[str] = None
    stream_options: Hint[dict[str, Any]] = None

    @property
    def text_format(self) -> TextFormat:
        """The format of the answer's text."""
        return (self.text and self.text.format) or TextFormat(type="text", schema=None)

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ())
