"""From a request's body to its running answers."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from starlette.requests import Request

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.errors import GenerationError, GLMMultiUserError
from glm_multiuser.sampling import SEED_MAX, SamplingParams
from glm_multiuser.server.ask import Ask
from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.errors import BAD_REQUEST, Refusal, refusal_of
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.openai.merge import Arrival, merged
from glm_multiuser.server.openai.requests import GenerationRequest
from glm_multiuser.server.request_context import caller_of, deadline_of, service_of, session_of
from glm_multiuser.tokenizers import ChatTokenizer


@dataclass(frozen=True)
class Answers:
    """Answers of one request: `per_prompt` to its first prompt, then those to the next one.

    Attributes:
        head: what the response, or every chunk of it, begins with.
        tokenizer: of the model.
        stop_token_ids: that end these answers.
    """

    head: dict[str, Any]
    tokenizer: Optional[ChatTokenizer]
    stop_token_ids: frozenset[int]
    per_prompt: int
    generations: list[Generation] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[Arrival]:
        """Pieces as they come, without log-probabilities of stop tokens.

        Raises:
            GLMMultiUserError: an answer failed, or the server ended it.
        """
        async for index, piece in merged(self.generations):
            if piece.logprobs and not self.stop_token_ids.isdisjoint(piece.token_ids):
                piece = replace(piece, logprobs=())
            yield index, piece

    async def whole(self, request: Request) -> list[tuple[GenerationResult, list[Piece]]]:
        """Every answer with its pieces; they are closed then.

        Raises:
            ClientGone: the client went away.
            GLMMultiUserError: as for `pieces`.
        """
        pieces: list[list[Piece]] = [[] for _ in self.generations]

        async def read() -> None:
            async for index, piece in self.pieces():
                pieces[index].append(piece)

        try:
            await unless_disconnected(request, read())
        finally:
            for generation in self.generations:
                generation.close()
        return list(zip(self.results(), pieces))

    def results(self) -> list[GenerationResult]:
        """Of all answers, once their last pieces have been read.

        Raises:
            GenerationError: an answer has not ended.
        """
        results = [one.result for one in self.generations if one.result is not None]
        if len(results) < len(self.generations):
            raise GenerationError("the request ended without a result")
        return results

    def usage(self) -> dict[str, Any]:
        """Counts of tokens, once the last pieces have been read."""
        usages = [result.usage for result in self.results()]
        prompts = usages[:: self.per_prompt]
        prompt_tokens = sum(one.prompt_tokens for one in prompts)
        completion_tokens = sum(one.completion_tokens for one in usages)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
        }


async def start(
    request: Request,
    body: GenerationRequest,
    prompts: Sequence[Ask],
    kind: tuple[str, str],
    max_tokens: Optional[int],
    logprobs: Optional[int],
) -> Answers:
    """Puts all answers that a body asks for into the queue.

    Args:
        request: who asks.
        body: how.
        prompts: what; their parameters are filled in here.
        kind: how the response's id begins, and its `object`.
        max_tokens: of each answer.
        logprobs: how many likeliest tokens are wanted in each place.

    Raises:
        Refusal: a field that cannot be, or what `Service.start` refuses.
    """
    service = service_of(request)
    model = service.models.get(body.model)
    wanted = body.choices * len(prompts)
    if wanted > service.settings.limits.choices:
        raise Refusal(
            400,
            BAD_REQUEST,
            f"n is {body.choices} for {len(prompts)} prompts, which makes {wanted} answers; one "
            f"request may ask for {service.settings.limits.choices}",
            field="n" if body.choices > 1 else "prompt",
        )
    with naming_fields(body):
        params = service.sampling(
            model,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            stop=tuple(body.stop) or None,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            cache_prompt=body.cache_prompt,
        )
        asks = [
            replace(prompt, params=_with_seed(params, choice))
            for prompt in prompts
            for choice in range(body.choices)
        ]
        llm = model.llm
        generations = await service.start(
            caller_of(request), model, asks, session_of(request, body.user), deadline_of(request)
        )
    prefix, name = kind
    return Answers(
        head={
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": model.name,
        },
        tokenizer=llm.tokenizer,
        stop_token_ids=frozenset(
            (*params.stop_token_ids, *(() if params.ignore_eos else llm.stop_token_ids))
        ),
        per_prompt=body.choices,
        generations=generations,
    )


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % (SEED_MAX + 1))


NAMES = {
    "prompt": ("prompt", "messages"),
    "query": ("prompt", "messages"),
    "text": ("prompt", "messages"),
    "history": ("messages",),
}
"""What the library calls otherwise, or a request of another kind has."""


@contextmanager
def naming_fields(body: GenerationRequest) -> Iterator[None]:
    """Lets an error about a value say which field it is, by the word that its message begins with.

    Raises:
        Refusal: for every error of this library.
    """
    try:
        yield
    except GLMMultiUserError as error:
        refusal = refusal_of(error)
        if refusal.status == 400 and refusal.field is None:
            refusal.field = _field_of(str(refusal), type(body).model_fields)
        if refusal is error:
            raise
        raise refusal from error


def _field_of(message: str, fields: Mapping[str, Any]) -> Optional[str]:
    found = re.match(r"\w+", message)
    word = found.group() if found else ""
    return next((name for name in NAMES.get(word, (word,)) if name in fields), None)
