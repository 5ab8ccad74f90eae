"""The bodies of requests of `/v1/responses`.

Fields that would change the answer and are not implemented are accepted at the value that changes
nothing, and rejected otherwise, as for `openai.requests`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field, StringConstraints

from glm_multiuser.server.bodies import ROUNDS_MAX, MaxTokens
from glm_multiuser.server.keys import SESSION_LENGTH_MAX
from glm_multiuser.server.openai.adapter import RUNS_NO_TOOL, SamplingFields
from glm_multiuser.server.openai.fields import NoEffect, Only, OrText, Stop, Strict
from glm_multiuser.server.openai.messages import TOOLS_MAX
from glm_multiuser.server.openai.requests import LogprobsCount
from glm_multiuser.server.responses_api.items import InputItem

LOGPROBS = "message.output_text.logprobs"
STORE_WHY = "is not implemented: responses are kept with `store` and a session only"


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Annotated[Any, Only("function", why=RUNS_NO_TOOL)]
    name: str
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = Field(None, description="A JSON schema.")
    strict: Optional[bool] = None

    allowed_callers: NoEffect = None
    defer_loading: NoEffect = None


class NamedFunction(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Optional[str] = None
    description: Optional[str] = None
    json_schema: Optional[dict[str, Any]] = Field(None, alias="schema")
    strict: Optional[bool] = None


class TextConfig(Strict):
    """The answer's text."""

    format: Optional[TextFormat] = None
    verbosity: Annotated[Any, Only("medium")] = None


class Reasoning(Strict):
    """Models here do not reason apart from their answer."""

    effort: Annotated[Any, Only("none")] = None
    context: NoEffect = None
    generate_summary: NoEffect = None
    mode: Annotated[Any, Only("standard")] = None
    summary: NoEffect = None


Metadata = dict[
    Annotated[str, StringConstraints(max_length=64)],
    Annotated[str, StringConstraints(max_length=512)],
]


class ResponseRequest(SamplingFields):
    """A conversation whose last message is to be answered."""

    model: Optional[str] = Field(None, description="null: the first model of the server.")
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=ROUNDS_MAX),
        OrText(lambda text: {"role": "user", "content": text}),
    ]
    instructions: Optional[str] = None
    max_output_tokens: MaxTokens = None
    stream: Optional[bool] = None
    tools: Optional[list[FunctionTool]] = Field(None, max_length=TOOLS_MAX)
    tool_choice: Optional[Union[Literal["none", "auto", "required"], NamedFunction]] = None
    parallel_tool_calls: Optional[bool] = None
    text: Optional[TextConfig] = None
    reasoning: Optional[Reasoning] = None
    include: Optional[list[str]] = Field(
        None, description=f"{LOGPROBS}; what else there is belongs to tools that run on a server."
    )
    top_logprobs: LogprobsCount = Field(None, description=f"Needs `include` with {LOGPROBS}.")
    metadata: Optional[Metadata] = Field(None, max_length=16)
    store: Optional[bool] = Field(
        None, description="Keeps the response for its session, which is needed; default: false."
    )
    previous_response_id: Optional[str] = Field(
        None, description="A stored response of the same session, which goes before the input."
    )
    user: Optional[str] = Field(
        None,
        description="Names a session, whose answers share a slot.",
        json_schema_extra={"maxLength": SESSION_LENGTH_MAX},
    )

    stop: Stop = Field(default_factory=list)

    background: Annotated[Any, Only(False, why=STORE_WHY)] = None
    context_management: Annotated[Any, Only([])] = None
    conversation: Annotated[Any, Only(why=STORE_WHY)] = None
    moderation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only(why=STORE_WHY)] = None
    truncation: Annotated[
        Any, Only("disabled", why="would drop messages; a prompt that is too long is rejected")
    ] = None

    stream_options: NoEffect = None
    max_tool_calls: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None

    @property
    def text_format(self) -> TextFormat:
        """The form of the answer's text."""
        return (self.text and self.text.format) or TextFormat(type="text", schema=None)

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ())
