"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.openai.generation_group import GenerationGroup, start
from glm_multiuser.server.openai.logprobs import completion_logprobs
from glm_multiuser.server.openai.requests import CompletionRequest
from glm_multiuser.server.openai.response_models import Completion
from glm_multiuser.server.openai.streaming import stream
from glm_multiuser.server.responses import OPENAI_ERRORS

router = APIRouter()

KIND = ("cmpl", "text_completion")


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: {"content": {"text/event-stream": {}}}, **OPENAI_ERRORS},
)
async def completions(request: Request, body: CompletionRequest) -> Any:
    """Answers one or several prompts, each by itself.

    With `stream` it is an event stream of `text_completion` objects that ends with `[DONE]`.
    """
    prompts = [GenerationRequest(prompt) for prompt in body.prompt]
    group = await start(request, body, prompts, KIND, body.max_tokens, body.logprobs)
    if body.stream:
        return stream(group, CompletionChunks(group, body), body.include_usage)
    choices = [
        _choice(index, result, pieces, group, body)
        for index, (result, pieces) in enumerate(await group.whole(request))
    ]
    return JSONResponse({**group.head, "choices": choices, "usage": group.usage()})


def _choice(
    index: int,
    result: GenerationResult,
    pieces: Sequence[Piece],
    group: GenerationGroup,
    body: CompletionRequest,
) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        logprobs = completion_logprobs(group.tokens(), pieces, 0, body.logprobs > 0)
    choice = _chunk(index, result.text, logprobs, result.finish_reason)
    return {**choice, "token_ids": result.token_ids} if body.return_token_ids else choice


class CompletionChunks:
    """Makes the choices of chunks: text, and at last why it ended.

    Args:
        group: that are streamed.
        body: what was asked for.
    """

    def __init__(self, group: GenerationGroup, body: CompletionRequest) -> None:
        self._with_top = bool(body.logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._tokens = [group.tokens() for _ in group.generations]
        self._offsets = [0] * len(group.generations)

    def __call__(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The choices that a piece of the answer of this number makes."""
        logprobs = None
        if piece.logprobs:
            logprobs = completion_logprobs(
                self._tokens[index], [piece], self._offsets[index], self._with_top
            )
        self._offsets[index] += len(piece.text)
        token_ids = piece.token_ids if self._token_ids else ()
        if piece.text or logprobs or token_ids:
            choice = _chunk(index, piece.text, logprobs)
            yield {**choice, "token_ids": token_ids} if self._token_ids else choice
        if piece.finish_reason is not None:
            yield _chunk(index, "", finish_reason=piece.finish_reason)


def _chunk(
    index: int,
    text: str,
    logprobs: Optional[dict[str, Any]] = None,
    finish_reason: Optional[str] = None,
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
