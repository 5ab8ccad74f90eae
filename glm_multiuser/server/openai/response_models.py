"""Response schemas for the OpenAPI description."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Optional

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class ModelCard(BaseModel):
    """A model that is ready, for clients of OpenAI and, from `type` on, of Anthropic.

    created: when it was loaded, in Unix time.
    max_model_len: maximum number of tokens of a prompt and its answer together.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int

    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"


class ModelList(BaseModel):
    """All models that are ready, on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]

    has_more: Literal[False] = False
    first_id: Optional[str]
    last_id: Optional[str]


class PromptTokensDetails(BaseModel):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionUsage(BaseModel):
    """Token counts, of every prompt once and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """A token and its log-probability; `bytes` is its UTF-8, possibly a partial character."""

    token: str
    logprob: float
    bytes: Optional[list[int]]


class TokenLogprob(TopLogprob):
    """A generated token and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """The called function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallCard(BaseModel):
    """A tool call; the message with its result refers to its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The answer; `tool_calls` is omitted if empty, otherwise the content may be null."""

    role: Literal["assistant"] = "assistant"
    content: Optional[str]
    refusal: None = None
    tool_calls: Optional[list[ToolCallCard]] = None


class ChatChoice(BaseModel):
    """One answer; `token_ids` only if the request asked for them."""

    index: int
    message: AssistantMessage
    logprobs: Optional[ChatLogprobs]
    finish_reason: FinishReason
    token_ids: Optional[list[int]] = None


class ChatCompletion(BaseModel):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class CompletionLogprobs(BaseModel):
    """One entry per token in every list; `text_offset` counts characters of the text.

    With `echo`, the prompt tokens come first; the first one has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[Optional[float]]
    top_logprobs: Optional[list[Optional[dict[str, float]]]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer; `token_ids` only if the request asked for them."""

    index: int
    text: str
    logprobs: Optional[CompletionLogprobs]
    finish_reason: FinishReason
    token_ids: Optional[list[int]] = None


class Completion(BaseModel):
    """Answers to all prompts, in the order of the prompts."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
