"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional, Union

from fastapi import APIRouter, Request

from glm_multiuser.answer import CallDelta, GenerationResult, Piece
from glm_multiuser.server.error_models import OPENAI_ERRORS
from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.large_json import LargeJSONResponse
from glm_multiuser.server.openai.conversation import conversation
from glm_multiuser.server.openai.generation_group import GenerationGroup, start
from glm_multiuser.server.openai.logprobs import chat_logprobs
from glm_multiuser.server.openai.requests import ChatRequest
from glm_multiuser.server.openai.response_models import ChatCompletion
from glm_multiuser.server.openai.streaming import stream
from glm_multiuser.tokenizers import ToolCall

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"content": {"text/event-stream": {}}}, **OPENAI_ERRORS},
)
async def chat_completions(request: Request, body: ChatRequest) -> Any:
    """Answers the last message of a conversation.

    With `stream`, returns an event stream of `chat.completion.chunk` objects, ended by `[DONE]`.
    """
    kind = ("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    group = await start_chat(request, body, kind)
    if body.stream:
        return stream(group, ChatChunks(group, body), body.include_usage)
    answers = await group.whole(request)

    def respond() -> LargeJSONResponse:
        choices = [_choice(index, *one, group, body) for index, one in enumerate(answers)]
        return LargeJSONResponse({**group.head, "choices": choices, "usage": group.usage()})

    # Log-probabilities of long answers take a second to write.
    return await asyncio.to_thread(respond) if body.logprobs else respond()


async def start_chat(request: Request, body: ChatRequest, kind: tuple[str, str]) -> GenerationGroup:
    """Starts the generations of a chat; arguments and errors are those of `start`."""
    wanted = generation_request(body)
    group = await start(request, body, [wanted], kind, _max_tokens(body), _logprobs(body))
    return replace(group, one_call=body.parallel_tool_calls is False)


def generation_request(body: ChatRequest) -> GenerationRequest:
    """Returns the prompt of a chat.

    Raises:
        APIError: 400, inconsistent messages or fields.
    """
    return GenerationRequest(
        messages=conversation(body.messages),
        tools=body.offered,
        continue_final_message=_continues(body),
    )


def _continues(body: ChatRequest) -> bool:
    continues = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and body.add_generation_prompt == continues:
        raise bad_request(
            f"add_generation_prompt is {json.dumps(continues)} and continue_final_message is "
            f"{json.dumps(continues)}; one of them must be true, and the other one false",
            field="add_generation_prompt",
        )
    if continues and body.forces_call:
        raise bad_request(
            "tool_choice forces a call, so the last message cannot be the beginning of the answer",
            field="tool_choice",
        )
    return continues


def _max_tokens(body: ChatRequest) -> Optional[int]:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is "
            f"{body.max_completion_tokens}; they mean the same, so give one of them",
            field="max_tokens",
        )
    return body.max_completion_tokens


def _logprobs(body: ChatRequest) -> Optional[int]:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs}; without logprobs it can only be 0",
            field="top_logprobs",
        )
    return None


def _choice(
    index: int,
    result: GenerationResult,
    pieces: Sequence[Piece],
    group: GenerationGroup,
    body: ChatRequest,
) -> dict[str, Any]:
    logprobs = [one for piece in pieces for one in piece.logprobs or ()]
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    if result.tool_calls:
        message["content"] = result.text or None
        message["tool_calls"] = [_new_call(call) for call in result.tool_calls]
    choice = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(group.tokens(), logprobs) if body.logprobs else None,
        "finish_reason": _finish_reason(result),
    }
    return {**choice, "token_ids": result.token_ids} if body.return_token_ids else choice


def _finish_reason(result: GenerationResult) -> str:
    ended_by_itself = result.finish_reason == "stop"
    return "tool_calls" if result.tool_calls and ended_by_itself else result.finish_reason


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _new_call(call: Union[ToolCall, CallDelta]) -> dict[str, Any]:
    return chat_call(f"call_{uuid.uuid4().hex}", call.name, call.arguments)


class ChatChunks:
    """Generates the choices of chunks: the role, then text and calls, then the finish reason.

    With a tool grammar, the arguments of calls are streamed. Otherwise each call is sent whole at
    the end, because until then it may turn out to be text.

    Args:
        group: the streamed generations.
        body: of the request.
    """

    def __init__(self, group: GenerationGroup, body: ChatRequest) -> None:
        self._generations = group.generations
        self._tokens = [group.tokens() for _ in group.generations]
        self._token_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()

    def __call__(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yields the choices for a piece of the answer with this index."""
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk(index, {"role": "assistant", "content": ""})
        logprobs = None
        if piece.logprobs:
            logprobs = chat_logprobs(self._tokens[index], piece.logprobs)
        token_ids = piece.token_ids if self._token_ids else ()
        if piece.text or logprobs or token_ids:
            choice = _chunk(index, {"content": piece.text}, logprobs)
            yield {**choice, "token_ids": token_ids} if self._token_ids else choice
        for call in piece.calls:
            yield _chunk(index, {"tool_calls": [_call_delta(call)]})
        result = self._generations[index].result
        if piece.finish_reason is not None and result is not None:
            yield _chunk(index, {}, finish_reason=_finish_reason(result))


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_new_call(call)}


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: Optional[dict[str, Any]] = None,
    finish_reason: Optional[str] = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
