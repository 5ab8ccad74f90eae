"""Answers of a model whose logits are random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np

from glm_multiuser.answer import AnswerCollector
from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.sampling import RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.compiler import GrammarCompiler
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.tokenizers import ChatTokenizer
from glm_multiuser.tokenizers.calls import ToolCall


class Allows(Protocol):
    """Whether an answer of a schema may be this text."""

    def __call__(self, schema: object, text: str) -> bool: ...


class Answer(NamedTuple):
    """What a caller sees; `complete` unless it was cut off."""

    text: str
    calls: tuple[ToolCall, ...]
    token_ids: list[int]
    complete: bool


def compiler_of(tokenizer: ChatTokenizer) -> GrammarCompiler:
    # Vocabularies of models are padded.
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 3, tokenizer.stop_token_ids)


def walk(
    compiler: GrammarCompiler,
    tokenizer: ChatTokenizer,
    grammar: Grammar,
    seed: int,
    tools: Sequence[Any] = (),
    longest: int = 400,
    **wanted: Any,
) -> Answer:
    """The answer of a model with random logits, read as a conversation's answer is."""
    params = SamplingParams(grammar=grammar, seed=seed, **wanted)
    matcher = compiler.compile(grammar)
    stops, size = tokenizer.stop_token_ids, compiler.vocab_size
    request = Request([1, 2], params, "user", stops, longest, size, _ignore, matcher=matcher)
    collector = AnswerCollector(request, tokenizer, tokenizer.answer_reader(tools))
    sampler = RowSampler(params, [1, 2], stops, size, matcher)
    logits = np.random.default_rng(seed)
    token_ids: list[int] = []
    while not sampler.complete and len(token_ids) < longest:
        scores = logits.normal(0, 3, (1, size)).astype(np.float32)
        (choice,) = choose(scores, [sampler])
        assert choice is not None
        sampler.accept(choice.token_id)
        token_ids.append(choice.token_id)
        collector.take(Token(choice, 1.0))
    collector.take(End("stop" if sampler.complete else "length", None, 0.0, 1.0))
    assert collector.result is not None
    result = collector.result
    return Answer(result.text, result.tool_calls, token_ids, sampler.complete)


def may_be(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, grammar: Grammar, text: str
) -> bool:
    """Whether an answer of a grammar may be this text."""
    matcher = compiler.compile(grammar)
    for token_id in tokenizer.encode_inside(tokenizer.content_header() + text):
        if matcher.complete or not matcher.allowed()[token_id]:
            return False
        matcher.accept(token_id)
    return matcher.complete or bool(matcher.allowed()[list(tokenizer.stop_token_ids)].any())


def _ignore(event: Event) -> None:
    pass


def tool(name: str, parameters: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
