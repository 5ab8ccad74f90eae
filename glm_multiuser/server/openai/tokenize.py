"""`POST /tokenize` and `/detokenize`, in vLLM's wire format."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Annotated, Any, Callable, Optional, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.server.bodies import ROUNDS_MAX, LongList, Strict
from glm_multiuser.server.error_models import ERRORS
from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.models import Model
from glm_multiuser.server.openai.conversation import conversation
from glm_multiuser.server.openai.fields import Only
from glm_multiuser.server.openai.messages import TOOLS_MAX, ChatMessage, Tool
from glm_multiuser.server.openai.requests import TokenId
from glm_multiuser.server.request_context import service_of
from glm_multiuser.server.service import LONG_PROMPT
from glm_multiuser.tokenizers import ChatTokenizer

router = APIRouter()

Result = TypeVar("Result")


class TokenizeRequest(Strict):
    """Either a text or a conversation with its tools."""

    model: Optional[str] = Field(None, description="null: the server's first model.")
    prompt: Optional[str] = Field(None, description="Tokenized without the chat template.")
    messages: Optional[list[ChatMessage]] = Field(
        None,
        min_length=1,
        max_length=ROUNDS_MAX,
        description="Tokenized as in `/v1/chat/completions`.",
    )
    tools: Optional[list[Tool]] = Field(None, max_length=TOOLS_MAX, description="For `messages`.")

    add_generation_prompt: Annotated[Any, Only(True)] = None
    add_special_tokens: Annotated[Any, Only(False)] = None
    chat_template: Annotated[Any, Only()] = None
    chat_template_kwargs: Annotated[Any, Only({})] = None
    continue_final_message: Annotated[Any, Only(False)] = None
    return_token_strs: Annotated[Any, Only(False)] = None


class TokenizeResponse(BaseModel):
    """Token ids; `max_model_len` is the maximum of a prompt and its answer together."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Strict):
    """Token ids."""

    model: Optional[str] = Field(None, description="null: the server's first model.")
    tokens: LongList[TokenId]


class DetokenizeResponse(BaseModel):
    """The text, with special tokens as their names."""

    prompt: str


@router.post("/tokenize", responses=ERRORS)
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """Tokenizes a text or a conversation, which may be longer than the model's prompts."""
    service = service_of(request)
    model = service.models.get(body.model)
    if body.messages is not None and body.prompt is None:
        wanted = GenerationRequest(
            messages=conversation(body.messages), tools=[one.offered() for one in body.tools or ()]
        )
        tokens = list(await service.token_ids(model, wanted))
    elif body.prompt is not None and body.messages is None and not body.tools:
        tokens = await text_token_ids(model, body.prompt)
    else:
        raise bad_request(
            "prompt: give a prompt, or messages with their tools, and not both", field="prompt"
        )
    longest = model.llm.max_length
    return TokenizeResponse(count=len(tokens), max_model_len=longest, tokens=tokens)


@router.post("/detokenize", responses=ERRORS)
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """Converts token ids to text."""
    model = service_of(request).models.get(body.model)
    tokenizer = _tokenizer_of(model, "tokens")
    highest = max(body.tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise InvalidParameterError(
            f"tokens has {highest}; token ids of {model.name!r} are below {tokenizer.vocab_size}",
            field="tokens",
        )
    text = await _run(len(body.tokens), lambda: _text_of(tokenizer, body.tokens))
    return DetokenizeResponse(prompt=text)


async def text_token_ids(model: Model, prompt: str) -> list[int]:
    """Tokenizes text without the chat format.

    Raises:
        InvalidParameterError: no tokenizer, or text that it cannot encode.
    """
    tokenizer = _tokenizer_of(model, "prompt")
    try:
        return await _run(len(prompt), lambda: tokenizer.encode(prompt))
    except InvalidParameterError as error:
        raise InvalidParameterError(f"prompt: {error}", "prompt") from error


def _tokenizer_of(model: Model, field: str) -> ChatTokenizer:
    """Returns the tokenizer of a model.

    Raises:
        InvalidParameterError: the checkpoint has none.
    """
    tokenizer = model.llm.tokenizer
    if tokenizer is None:
        raise InvalidParameterError(
            f"{field}: model {model.name!r} has no tokenizer; it takes and returns token ids", field
        )
    return tokenizer


def _text_of(tokenizer: ChatTokenizer, token_ids: list[int]) -> str:
    text = ""
    for special, run in groupby(token_ids, tokenizer.special_ids.__contains__):
        ids = list(run)
        # `decode` omits special tokens.
        names = b"".join(map(tokenizer.token_bytes, ids)) if special else b""
        text += names.decode() if special else tokenizer.decode(ids)
    return text


async def _run(size: int, function: Callable[[], Result]) -> Result:
    """Runs calls that take milliseconds in another thread than the event loop's."""
    return await asyncio.to_thread(function) if size > LONG_PROMPT else function()
