"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.server.errors import BAD_REQUEST, Refusal
from glm_multiuser.server.openai.logprobs import chat_logprobs
from glm_multiuser.server.openai.requests import ChatMessage, ChatRequest
from glm_multiuser.server.openai.response_models import ChatCompletion
from glm_multiuser.server.openai.running import Answers, start
from glm_multiuser.server.openai.streaming import stream
from glm_multiuser.server.responses import OPENAI_ERRORS
from glm_multiuser.server.service import Ask

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"content": {"text/event-stream": {}}}, **OPENAI_ERRORS},
)
async def chat_completions(request: Request, body: ChatRequest) -> Any:
    """Answers the last message of a conversation.

    With `stream` it is an event stream of `chat.completion.chunk` objects that ends with `[DONE]`.
    """
    ask = conversation(body.messages)
    kind = ("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")
    answers = await start(request, body, [ask], kind, _max_tokens(body), _logprobs(body))
    if body.stream:
        return stream(answers, ChatChunks(answers, body), body.include_usage)
    choices = [
        _choice(index, result, pieces, answers, body)
        for index, (result, pieces) in enumerate(await answers.whole(request))
    ]
    return JSONResponse({**answers.head, "choices": choices, "usage": answers.usage()})


def conversation(messages: Sequence[ChatMessage]) -> Ask:
    """The open question with what was said before.

    Args:
        messages: at least one.

    Raises:
        Refusal: 400, a role where it cannot stand.
    """
    expected = ["system", "user"]
    history = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        if role not in expected:
            raise _wrong_role(place, message, expected)
        expected = ["assistant"] if role == "user" else ["user"]
        history.append({"role": role, "content": message.content})
    if messages[-1].role != "user":
        raise _wrong_role(len(messages) - 1, messages[-1], ["user"])
    return Ask(history.pop()["content"], history)


def _wrong_role(place: int, message: ChatMessage, expected: Sequence[str]) -> Refusal:
    return Refusal(
        400,
        BAD_REQUEST,
        f"messages[{place}] has role {message.role!r} where only {' or '.join(expected)} can "
        "stand: at most one system message comes first, then user and assistant take turns, and "
        "the last message is the user's",
        field="messages",
    )


def _max_tokens(body: ChatRequest) -> Optional[int]:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise Refusal(
            400,
            BAD_REQUEST,
            f"max_tokens is {body.max_tokens} and max_completion_tokens is "
            f"{body.max_completion_tokens}; they mean the same, so give one of them",
            field="max_tokens",
        )
    return body.max_completion_tokens


def _logprobs(body: ChatRequest) -> Optional[int]:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise Refusal(
            400,
            BAD_REQUEST,
            f"top_logprobs is {body.top_logprobs}; without logprobs it can only be 0",
            field="top_logprobs",
        )
    return None


def _choice(
    index: int,
    result: GenerationResult,
    pieces: Sequence[Piece],
    answers: Answers,
    body: ChatRequest,
) -> dict[str, Any]:
    logprobs = [one for piece in pieces for one in piece.logprobs or ()]
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": chat_logprobs(answers.tokenizer, logprobs) if body.logprobs else None,
        "finish_reason": result.finish_reason,
    }
    return {**choice, "token_ids": result.token_ids} if body.return_token_ids else choice


class ChatChunks:
    """Makes the choices of chunks: first the role, then text, at last why it ended.

    Args:
        answers: that are streamed.
        body: what was asked for.
    """

    def __init__(self, answers: Answers, body: ChatRequest) -> None:
        self._tokenizer = answers.tokenizer
        self._logprobs = bool(body.logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()

    def __call__(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The choices that a piece of the answer of this number makes."""
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk(index, {"role": "assistant", "content": ""})
        logprobs = None
        if piece.logprobs:
            logprobs = chat_logprobs(self._tokenizer, piece.logprobs)
        token_ids = piece.token_ids if self._token_ids else ()
        if piece.text or logprobs or token_ids:
            choice = _chunk(index, {"content": piece.text}, logprobs)
            yield {**choice, "token_ids": token_ids} if self._token_ids else choice
        if piece.finish_reason is not None:
            yield _chunk(index, {}, finish_reason=piece.finish_reason)


def _chunk(
    index: int,
    delta: dict[str, str],
    logprobs: Optional[dict[str, Any]] = None,
    finish_reason: Optional[str] = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
