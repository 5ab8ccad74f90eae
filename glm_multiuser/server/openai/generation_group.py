"""Starts the generations of a request and collects their answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from starlette.requests import Request

from glm_multiuser.answer import GenerationResult, Piece
from glm_multiuser.errors import GenerationError
from glm_multiuser.sampling_params import SEED_MAX, SamplingParams
from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.errors import APIError, bad_request
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.generation_request import GenerationRequest, sampling_of
from glm_multiuser.server.openai.merge import Arrival, merged
from glm_multiuser.server.openai.requests import BaseRequest
from glm_multiuser.server.request_context import caller_of, deadline_in, service_of, session_of
from glm_multiuser.server.settings import most_answers
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import AnswerTokens, ChatTokenizer

LIBRARY_PROMPT = ("prompt", "text")
"""The library's names of a body's `prompt_field`."""


@dataclass(frozen=True)
class GenerationGroup:
    """The generations of one request: `per_prompt` for its first prompt, then for the next.

    Attributes:
        head: the first fields of the response and of every chunk.
        tokenizer: of the model.
        continued: whether the prompts contain the start of the answer.
        raw: whether answers are returned as generated.
        exact: whether a grammar constrains their content.
        silent_token_ids: stop tokens, whose log-probabilities are omitted.
        one_call: whether to drop all calls of an answer but the first.
        prompt_only: whether to omit the answers, which have one token each, the minimum of a
            request.
    """

    head: dict[str, Any]
    tokenizer: Optional[ChatTokenizer]
    continued: bool
    raw: bool
    exact: bool
    silent_token_ids: frozenset[int]
    per_prompt: int
    generations: list[Generation] = field(default_factory=list)
    one_call: bool = False
    prompt_only: bool = False

    def tokens(self) -> Optional[AnswerTokens]:
        """Returns a decoder of an answer's tokens to bytes; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.answer_tokens(
            continued=self.continued, raw=self.raw, exact=self.exact
        )

    async def pieces(self) -> AsyncIterator[Arrival]:
        """Yields pieces as they arrive, without log-probabilities of stop tokens.

        Raises:
            GLMMultiUserError: an answer failed, or the server ended it.
        """
        async for index, piece in merged(self.generations):
            if piece.logprobs and not self.silent_token_ids.isdisjoint(piece.token_ids):
                piece = replace(piece, logprobs=())
            if self.one_call:
                piece = replace(piece, calls=tuple(one for one in piece.calls if one.index == 0))
            yield index, _without_answer(piece) if self.prompt_only else piece

    async def whole(self, request: Request) -> list[tuple[GenerationResult, list[Piece]]]:
        """Returns every answer with its pieces, and closes the generations.

        Raises:
            ClientDisconnected: the client disconnected.
            GLMMultiUserError: as for `pieces`.
        """
        pieces: list[list[Piece]] = [[] for _ in self.generations]

        async def read() -> None:
            async for index, piece in self.pieces():
                pieces[index].append(piece)

        await self.run(request, read())
        return list(zip(self.results(), pieces))

    async def run(self, request: Request, reading: Coroutine[Any, Any, None]) -> None:
        """Runs `reading`, which reads every piece, and closes the generations.

        Raises:
            ClientDisconnected: the client disconnected.
            GLMMultiUserError: as for `pieces`.
        """
        try:
            await unless_disconnected(request, reading)
        finally:
            for generation in self.generations:
                generation.close()

    def results(self) -> list[GenerationResult]:
        """Returns the results of all answers, once their last pieces have been read.

        Raises:
            GenerationError: an answer has not ended.
        """
        results = [one.result for one in self.generations if one.result is not None]
        if len(results) < len(self.generations):
            raise GenerationError("the request ended without a result")
        if self.one_call:
            results = [replace(one, tool_calls=one.tool_calls[:1]) for one in results]
        return [_without_tokens(one) for one in results] if self.prompt_only else results

    def usage(self) -> dict[str, Any]:
        """Returns the token counts, once the last pieces have been read."""
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


def check_number_of_answers(request: Request, body: BaseRequest, prompts: int) -> None:
    """Raises APIError if a request with so many prompts asks for too many answers."""
    service = service_of(request)
    wanted = body.choices * prompts
    most = most_answers(service.settings.limits, service.models.get(body.model).settings.engine)
    if wanted > most:
        name = "n" if body.choices == (body.n or 1) else "best_of"
        raise bad_request(
            f"{name} is {body.choices} for {prompts} prompts, which makes {wanted} answers; "
            f"one request may ask for {most}",
            field=name if body.choices > 1 else "prompt",
        )


async def start(
    request: Request,
    body: BaseRequest,
    prompts: Sequence[GenerationRequest],
    kind: tuple[str, str],
    max_tokens: Optional[int],
    logprobs: Optional[int],
    prompt_logprobs: Optional[int] = None,
) -> GenerationGroup:
    """Submits all generations of a request.

    Args:
        request: the HTTP request.
        body: its body.
        prompts: their sampling parameters are filled in here.
        kind: the prefix of the response's id, and its `object`.
        max_tokens: of each answer; 0 returns the prompts alone.
        logprobs: number of most likely tokens to return for each token.
        prompt_logprobs: the same for prompt tokens; if given, stop tokens have log-probabilities,
            too.

    Raises:
        APIError: an invalid field, or as `Service.start`.
        ClientDisconnected: the client disconnected before a grammar was compiled.
    """
    check_number_of_answers(request, body, len(prompts))
    service = service_of(request)
    model = service.models.get(body.model)
    params = sampling_of(
        model.llm.default_params,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop=tuple(body.stop) or None,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=_grammar(body, model.llm.tokenizer),
        cache_prompt=body.cache_prompt,
    )
    requests = [
        replace(prompt, params=_with_seed(params, choice))
        for prompt in prompts
        for choice in range(body.choices)
    ]
    llm = model.llm
    try:
        starting = service.start(
            caller_of(request),
            model,
            requests,
            session_of(request, body.user),
            deadline_in(request.headers),
        )
        if params.grammar is not None:
            starting = _unless_disconnected(request, starting)  # it may wait for the compiler
        generations = await starting
    except APIError as error:
        if error.field in LIBRARY_PROMPT:
            error.field = body.prompt_field
        elif error.field == "grammar":
            name = body.grammar_field
            raise APIError(error.status, error.code, f"{name}: {error}", field=name) from None
        elif error.field == "prompt_logprobs":
            problem = f"echo with logprobs: {error}"
            raise APIError(error.status, error.code, problem, field="echo") from None
        raise
    prefix, name = kind
    return GenerationGroup(
        head={
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": model.name,
        },
        tokenizer=llm.tokenizer,
        continued=any(prompt.continue_final_message for prompt in prompts),
        raw=not any(prompt.is_text for prompt in prompts),
        exact=params.grammar is not None and params.grammar.is_content,
        silent_token_ids=frozenset(
            (*params.stop_token_ids, *(() if params.ignore_eos else llm.stop_token_ids))
        )
        if prompt_logprobs is None
        else frozenset(),
        per_prompt=body.choices,
        generations=generations,
        prompt_only=max_tokens == 0,
    )


async def _unless_disconnected(
    request: Request, starting: Coroutine[Any, Any, list[Generation]]
) -> list[Generation]:
    started: list[Generation] = []

    async def start() -> None:
        started.extend(await starting)

    try:
        await unless_disconnected(request, start())
    except BaseException:
        for generation in started:  # if the client disconnected at the same moment
            generation.close()
        raise
    return started


def _without_answer(piece: Piece) -> Piece:
    reason = "length" if piece.finish_reason == "stop" else piece.finish_reason
    return Piece("", (), reason, prompt_logprobs=piece.prompt_logprobs)


def _without_tokens(result: GenerationResult) -> GenerationResult:
    usage = replace(result.usage, completion_tokens=0)
    return replace(result, text="", token_ids=(), finish_reason="length", usage=usage, logprobs=())


def _grammar(body: BaseRequest, tokenizer: Optional[ChatTokenizer]) -> Optional[Grammar]:
    """Returns the grammar of the answers. Optional calls of a family with its own call format stay
    unconstrained, because a format that it was not trained on would degrade them."""
    grammar = body.answer_grammar()
    if grammar and grammar.is_free and tokenizer and not tokenizer.calls_are_json:
        return None
    return grammar


def _with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice) % (SEED_MAX + 1))
