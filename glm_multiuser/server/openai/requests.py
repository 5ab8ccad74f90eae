"""Request bodies. Values of the wrong type are rejected, not converted."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Optional

from pydantic import Field

from glm_multiuser.sampling_params import LOGPROBS_MAX, PENALTY_MAX, REPETITION_PENALTY_MAX
from glm_multiuser.server.bodies import (
    ROUNDS_MAX,
    LongList,
    MaxTokens,
    NotBoolean,
    Seed,
    SessionName,
    Strict,
    Temperature,
    TopP,
)
from glm_multiuser.server.openai.extensions import Extensions
from glm_multiuser.server.openai.fields import (
    CHOICES_MAX,
    Hint,
    LogitBias,
    MinusOne,
    NoEffect,
    Only,
    Prompts,
    Stop,
)
from glm_multiuser.server.openai.messages import TOOLS_MAX, ChatMessage, Tool
from glm_multiuser.server.openai.structured import (
    FieldGrammar,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
    ToolChoice,
    call_mode,
    callable_tools,
    only_one,
    response_grammar,
    structured_grammar,
    tool_grammar,
)
from glm_multiuser.structured.grammar import Grammar

ALL_TOKENS = 2**31 - 1
"""Overrides the checkpoint's default with more than any `seq_length`."""

TokenId = Annotated[int, Field(ge=0)]
LogprobsCount = Annotated[Optional[int], Field(ge=0, le=LOGPROBS_MAX)]
MODES = ("none", "auto")
Penalty = Annotated[Optional[float], Field(ge=-PENALTY_MAX, le=PENALTY_MAX)]
UNLIMITED = MinusOne(ALL_TOKENS, "as many as there is room for")


class StreamOptions(Strict):
    """Additions to a stream.

    `continuous_usage_stats`, which some benchmarks send, is accepted; usage is sent at the end.
    """

    include_usage: Optional[bool] = None
    include_obfuscation: NoEffect = None
    continuous_usage_stats: NoEffect = None


class BaseRequest(Extensions):
    """Fields of both chat and completions.

    prompt_field: name of the field with the prompt.
    """

    prompt_field: ClassVar[str]

    model: Optional[str] = Field(None, description="null: the server's first model.")
    stream: Optional[bool] = None
    stream_options: Optional[StreamOptions] = None
    max_tokens: Annotated[MaxTokens, UNLIMITED] = None
    temperature: Temperature = None
    top_p: TopP = None
    stop: Stop = Field(default_factory=list)
    seed: Annotated[Seed, MinusOne(None, "a fresh one")] = None
    n: Optional[int] = Field(
        None,
        ge=1,
        description="Answers per prompt.",
        json_schema_extra={"maximum": CHOICES_MAX},
    )
    user: SessionName = None

    top_k: Annotated[Optional[int], Field(ge=0, description="0: off."), MinusOne(0, "off")] = None
    repetition_penalty: Optional[float] = Field(
        None, gt=0, le=REPETITION_PENALTY_MAX, description="1: off."
    )
    min_tokens: Optional[int] = Field(None, ge=0)
    ignore_eos: Optional[bool] = None
    stop_token_ids: Optional[LongList[TokenId]] = None
    cache_prompt: Optional[bool] = Field(
        None, description="false: bypass the session's prefix cache."
    )
    return_token_ids: Optional[bool] = Field(
        None, description="Adds `token_ids` to every choice: all generated tokens."
    )

    structured_outputs: Optional[StructuredOutputs] = None
    guided_json: Optional[SchemaOrText] = Field(None, description="Legacy vLLM field.")
    guided_regex: Optional[str] = Field(None, description="Legacy vLLM field.")
    guided_choice: Optional[LongList[str]] = Field(None, description="Legacy vLLM field.")
    guided_grammar: Optional[str] = Field(None, description="Legacy vLLM field.")

    min_p: Optional[float] = Field(None, ge=0, le=1, description="0: off.")
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    logit_bias: LogitBias = None

    @property
    def structured(self) -> Optional[FieldGrammar]:
        """The grammar of vLLM's fields, if any. Raises as `answer_grammar`."""
        return structured_grammar(
            {
                "structured_outputs": self.structured_outputs,
                "guided_json": StructuredOutputs(json=self.guided_json),
                "guided_regex": StructuredOutputs(json=None, regex=self.guided_regex),
                "guided_choice": StructuredOutputs(json=None, choice=self.guided_choice),
                "guided_grammar": StructuredOutputs(json=None, grammar=self.guided_grammar),
            }
        )

    @property
    def grammar_field(self) -> str:
        """The field that the grammar comes from, for error messages."""
        structured = self.structured
        return structured.field if structured else "structured_outputs"

    def answer_grammar(self) -> Optional[Grammar]:
        """Returns the grammar of the answers, if any.

        Raises:
            InvalidParameterError: an invalid grammar; names its field.
        """
        structured = self.structured
        return structured.grammar if structured else None

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(BaseRequest):
    """A conversation to answer."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage] = Field(min_length=1, max_length=ROUNDS_MAX)
    max_completion_tokens: Annotated[MaxTokens, UNLIMITED] = None
    continue_final_message: Optional[bool] = Field(
        None, description="Continue the last message, which must be an assistant's."
    )
    add_generation_prompt: Optional[bool] = Field(
        None, description="As in vLLM; false with `continue_final_message`, and only then."
    )
    logprobs: Optional[bool] = None
    top_logprobs: LogprobsCount = Field(None, description="Needs `logprobs`.")
    tools: Optional[list[Tool]] = Field(
        None,
        max_length=TOOLS_MAX,
        description="Tools the model may call; some families were not trained on tools.",
    )
    tool_choice: Optional[ToolChoice] = Field(
        None, description="required, or a function: the answer is exactly one call."
    )
    parallel_tool_calls: Optional[bool] = Field(
        None, description="false: at most one call per answer; others are dropped."
    )
    response_format: Optional[ResponseFormat] = None

    add_special_tokens: Annotated[Any, Only(False)] = None
    best_of: Annotated[Any, Only(1)] = None
    echo: Annotated[Any, Only(False)] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(*MODES)] = None
    functions: Annotated[Any, Only([])] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None

    metadata: NoEffect = None
    prediction: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_options: NoEffect = None
    prompt_cache_retention: NoEffect = None
    reasoning_effort: Hint[str] = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    verbosity: Hint[str] = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, which are in the prompt."""
        return [tool.offered() for tool in callable_tools(self.tools or (), self.tool_choice)]

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return call_mode(self.tool_choice) not in (None, "auto", "none")

    @property
    def grammar_field(self) -> str:
        if self.structured:
            return super().grammar_field
        return "tools" if self.forces_call or self.response_format is None else "response_format"

    def answer_grammar(self) -> Optional[Grammar]:
        tools = callable_tools(self.tools or (), self.tool_choice)
        content = response_grammar(self.response_format)
        called = tool_grammar(tools, call_mode(self.tool_choice), content)
        return only_one(
            self.structured, called or content, "tools" if called else "response_format"
        )


class CompletionRequest(BaseRequest):
    """Prompts to answer independently."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Prompts
    max_tokens: Annotated[
        Optional[int],
        Field(ge=0, description="Maximum new tokens; 0: none, with `echo`."),
        NotBoolean,
        UNLIMITED,
    ] = None
    logprobs: LogprobsCount = None

    best_of: Optional[int] = Field(
        None,
        ge=1,
        description="Candidates; the `n` of highest mean token log-probability are returned.",
        json_schema_extra={"maximum": CHOICES_MAX},
    )
    echo: Optional[bool] = Field(None, description="Prepend the prompt to the text.")

    add_special_tokens: Annotated[Any, Only(True)] = None
    suffix: Annotated[Any, Only("", why="needs a model that was trained to fill in")] = None

    @property
    def choices(self) -> int:
        return max(self.n or 1, self.best_of or 1)

    @property
    def scores_prompts(self) -> bool:
        """Whether prompt tokens get log-probabilities."""
        return bool(self.echo) and self.logprobs is not None
