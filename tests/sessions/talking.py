"""Conversations on a small model, and what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glm_multiuser import GenerationResult, MultiUserLLM, SamplingParams
from glm_multiuser.handle import Handle
from tests.engine.native_llm import open_llm
from tests.engine.small_model import CAUSAL, prompt

LENGTH = 128
MODEL = replace(CAUSAL, max_sequence_length=LENGTH)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
QUESTION = 13


def causal_llm(users: int, **settings: Any) -> MultiUserLLM:
    return open_llm(users, MODEL, seq_length=LENGTH, **settings)


def bits(result: GenerationResult) -> Any:
    """Everything about the numbers of an answer."""
    assert result.finish_reason == "length", result.error
    assert result.logprobs is not None
    return result.token_ids, [(one.logprob, sorted(one.top.items())) for one in result.logprobs]


@dataclass
class Conversation:
    """One user's questions and answers, as token ids."""

    number: int
    user: Any
    history: list[int] = field(default_factory=list)
    turn: int = 0
    answers: list[Any] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)

    def question(self) -> list[int]:
        return [*self.history, *prompt(100 * self.number + self.turn, QUESTION)]

    def ask(self, llm: MultiUserLLM) -> Handle:
        return llm.submit(self.question(), user=self.user, params=GREEDY)

    def answered(self, result: GenerationResult) -> None:
        self.answers.append(bits(result))
        self.cached.append(result.usage.cached_tokens)
        self.history = [*self.question(), *result.token_ids]
        self.turn += 1

    def talk(self, llm: MultiUserLLM) -> int:
        """A whole turn -> its cached tokens."""
        self.answered(self.ask(llm).result())
        return self.cached[-1]


def alone(llm: MultiUserLLM, number: int, turns: int) -> list[Any]:
    """The answers of a conversation whose prompts are computed whole."""
    one = Conversation(number, None)
    for _ in range(turns):
        one.talk(llm)
    assert one.cached == [0] * turns
    return one.answers


def all_alone(numbers: Sequence[int], turns: int) -> dict[int, list[Any]]:
    with causal_llm(1) as llm:
        return {number: alone(llm, number, turns) for number in numbers}
