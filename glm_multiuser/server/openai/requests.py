"""The bodies of requests. A value of another type is refused, not converted."""

from __future__ import annotations

from typing import Annotated, Any, Optional

from pydantic import Field

from glm_multiuser.sampling import LOGPROBS_MAX, REPETITION_PENALTY_MAX
from glm_multiuser.server.bodies import ROUNDS_MAX, MaxTokens, Seed, Temperature, TopP
from glm_multiuser.server.keys import SESSION_LENGTH_MAX
from glm_multiuser.server.openai.fields import (
    CHOICES_MAX,
    NoEffect,
    Only,
    Prompts,
    Stop,
    Strict,
)
from glm_multiuser.server.openai.messages import TOOLS_MAX, ChatMessage, Tool

TokenId = Annotated[int, Field(ge=0)]
LogprobsCount = Annotated[Optional[int], Field(ge=0, le=LOGPROBS_MAX)]
MODES = ("none", "auto")


class StreamOptions(Strict):
    """What a stream has besides the text.

    `continuous_usage_stats`, which some benchmarks send, is accepted; the usage comes at the end.
    """

    include_usage: Optional[bool] = None
    include_obfuscation: NoEffect = None
    continuous_usage_stats: NoEffect = None


class GenerationRequest(Strict):
    """What chat and completions have in common."""

    model: Optional[str] = Field(None, description="null: the first model of the server.")
    stream: Optional[bool] = None
    stream_options: Optional[StreamOptions] = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    stop: Stop = Field(default_factory=list)
    seed: Seed = None
    n: Optional[int] = Field(
        None,
        ge=1,
        description="Answers to each prompt.",
        json_schema_extra={"maximum": CHOICES_MAX},
    )
    user: Optional[str] = Field(
        None,
        description="Names a session, whose answers share a slot.",
        json_schema_extra={"maxLength": SESSION_LENGTH_MAX},
    )

    top_k: Optional[int] = Field(None, ge=0, description="0: off.")
    repetition_penalty: Optional[float] = Field(
        None, gt=0, le=REPETITION_PENALTY_MAX, description="1: off."
    )
    min_tokens: Optional[int] = Field(None, ge=0)
    ignore_eos: Optional[bool] = None
    stop_token_ids: Optional[list[TokenId]] = None
    cache_prompt: Optional[bool] = Field(
        None, description="false: computes also what the session's slot still holds of the prompt."
    )
    return_token_ids: Optional[bool] = Field(
        None, description="Adds `token_ids` to every choice: all generated tokens."
    )

    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """A conversation whose last message is to be answered."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=ROUNDS_MAX)
    max_completion_tokens: MaxTokens = None
    logprobs: Optional[bool] = None
    top_logprobs: LogprobsCount = Field(None, description="Needs `logprobs`.")
    tools: Optional[list[Tool]] = Field(
        None, max_length=TOOLS_MAX, description="What the model may call; some models know none."
    )
    tool_choice: Annotated[Any, Only(*MODES, why="cannot be forced upon a model")] = None

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(*MODES)] = None
    functions: Annotated[Any, Only([])] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None

    metadata: NoEffect = None
    parallel_tool_calls: NoEffect = None
    prediction: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model hears of; none where it must not call one."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.offered() for tool in tools]


class CompletionRequest(GenerationRequest):
    """Prompts to be answered, each by itself."""

    prompt: Prompts
    logprobs: LogprobsCount = None

    best_of: Annotated[Any, Only(1)] = None
    echo: Annotated[Any, Only(False)] = None
    suffix: Annotated[Any, Only()] = None
