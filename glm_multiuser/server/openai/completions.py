"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from fastapi import APIRouter, Request

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.server.error_models import OPENAI_ERRORS
from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.large_json import LargeJSONResponse
from glm_multiuser.server.openai.echo import echoed, read_prompts
from glm_multiuser.server.openai.fields import Prompt
from glm_multiuser.server.openai.generation_group import (
    GenerationGroup,
    check_number_of_answers,
    start,
)
from glm_multiuser.server.openai.logprobs import completion_logprobs, joined
from glm_multiuser.server.openai.requests import CompletionRequest
from glm_multiuser.server.openai.response_models import Completion
from glm_multiuser.server.openai.streaming import stream

router = APIRouter()

KIND = ("cmpl", "text_completion")


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={200: {"content": {"text/event-stream": {}}}, **OPENAI_ERRORS},
)
async def completions(request: Request, body: CompletionRequest) -> Any:
    """Answers one or several prompts independently.

    With `stream`, returns an event stream of `text_completion` objects, ended by `[DONE]`.
    """
    _check(body)
    # First, because tokenizing many prompts takes long.
    check_number_of_answers(request, body, len(body.prompt))
    prompts = await read_prompts(request, body)
    # `_best` ranks answers by the mean log-probability of their tokens.
    logprobs = 0 if body.logprobs is None and _chooses(body) else body.logprobs
    group = await start(
        request,
        body,
        [GenerationRequest(prompt) for prompt in prompts],
        KIND,
        body.max_tokens,
        logprobs,
        body.logprobs if body.echo else None,
    )
    if body.stream:
        return stream(group, CompletionChunks(group, body, prompts), body.include_usage)
    answers = await group.whole(request)

    def respond() -> LargeJSONResponse:
        kept = [
            (prompt, answer)
            for place, prompt in enumerate(prompts)
            for answer in _best(answers, place, body)
        ]
        choices = [_choice(index, *one, group, body) for index, one in enumerate(kept)]
        return LargeJSONResponse({**group.head, "choices": choices, "usage": group.usage()})

    # Log-probabilities of long prompts take a second to write.
    return respond() if body.logprobs is None else await asyncio.to_thread(respond)


Answer = tuple[GenerationResult, list[Piece]]


def _check(body: CompletionRequest) -> None:
    wanted = body.n or 1
    problem, field = "", "best_of"
    if body.best_of is not None and body.best_of < wanted:
        problem = f"best_of is {body.best_of}; it must be at least n, which is {wanted}"
    elif _chooses(body) and body.stream:
        problem = f"best_of is {body.best_of}; in a stream it can only be n, which is {wanted}"
    elif body.max_tokens == 0 and not body.echo:
        problem, field = "max_tokens is 0; without echo it must be at least 1", "max_tokens"
    if problem:
        raise bad_request(problem, field=field)


def _chooses(body: CompletionRequest) -> bool:
    return body.choices > (body.n or 1)


def _best(answers: Sequence[Answer], place: int, body: CompletionRequest) -> list[Answer]:
    """Returns the `n` answers to this prompt with the highest mean log-probability, best first."""
    of_prompt = list(answers[place * body.choices : (place + 1) * body.choices])
    if not _chooses(body):
        return of_prompt
    return sorted(of_prompt, key=_mean_logprob, reverse=True)[: body.n or 1]


def _mean_logprob(answer: Answer) -> float:
    logprobs = [one.logprob for one in answer[0].logprobs or ()]
    return sum(logprobs) / max(1, len(logprobs))


def _choice(
    index: int, prompt: Prompt, answer: Answer, group: GenerationGroup, body: CompletionRequest
) -> dict[str, Any]:
    result, pieces = answer
    before = echoed(group, body, prompt, result.prompt_logprobs)
    logprobs = None
    if body.logprobs is not None:
        offset, with_top = len(before.text), body.logprobs > 0
        of_answer = completion_logprobs(group.tokens(), pieces, offset, with_top)
        logprobs = joined(before.logprobs, of_answer)
    choice = _chunk(index, before.text + result.text, logprobs, result.finish_reason)
    return {**choice, "token_ids": result.token_ids} if body.return_token_ids else choice


class CompletionChunks:
    """Generates the choices of chunks: text, then the finish reason.

    Args:
        group: the streamed generations.
        body: of the request.
        prompts: of the request, for `echo`.
    """

    def __init__(
        self, group: GenerationGroup, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._group = group
        self._body = body
        self._prompts = prompts
        self._begun: set[int] = set()
        self._with_top = bool(body.logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._tokens = [group.tokens() for _ in group.generations]
        self._offsets = [0] * len(group.generations)

    def __call__(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yields the choices for a piece of the answer with this index."""
        if index not in self._begun:
            self._begun.add(index)
            prompt = self._prompts[index // self._body.choices]
            before = echoed(self._group, self._body, prompt, piece.prompt_logprobs)
            self._offsets[index] = len(before.text)
            if before.text or before.logprobs:
                yield _chunk(index, before.text, before.logprobs)
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
