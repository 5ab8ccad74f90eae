"""Bias, penalties, min-p and the mask of a grammar: against their definitions, in float64."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.sampling import RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.grammar import Grammar
from tests.sampling.reference import assert_fits, distribution

VOCAB = 60
ANSWER = [5, 5, 7, 5, 59]
ALLOWED = [1, 5, 7, 20, 21, 22, 40, 59]
DRAWS = 3000


class FixedMatcher:
    """Allows the same tokens everywhere."""

    complete = False

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> NDArray[np.bool_]:
        return np.isin(np.arange(VOCAB), ALLOWED)


def sampler_of(params: SamplingParams) -> RowSampler:
    matcher = FixedMatcher() if params.grammar else None
    sampler = RowSampler(params, [3], [], VOCAB, matcher)
    for token_id in ANSWER:
        sampler.accept(token_id)
    return sampler


def defined(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The probability of every token: OpenAI's formulas, then min-p of the Hugging Face library,
    which stands before top-k and top-p as in vLLM."""
    scores = logits.astype(np.float64)
    if params.grammar:
        scores[~FixedMatcher().allowed()] = -np.inf
    for token_id, bias in dict(params.logit_bias).items():
        scores[token_id] += bias
    seen = {3, *ANSWER} if params.repetition_penalty != 1 else set()
    for token_id in seen:
        penalty = params.repetition_penalty
        scores[token_id] *= penalty if scores[token_id] < 0 else 1 / penalty
    for token_id in set(ANSWER):
        scores[token_id] -= ANSWER.count(token_id) * params.frequency_penalty
        scores[token_id] -= params.presence_penalty
    if params.temperature:
        weights = np.exp((scores - scores.max()) / params.temperature)
        scores[weights < params.min_p * weights.max()] = -np.inf
    plain = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    return distribution(scores, plain)


ANY = Grammar.regex("x")


@pytest.mark.parametrize(
    "wanted",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"presence_penalty": -0.5, "frequency_penalty": -0.3, "temperature": 0.7},
        {"logit_bias": {5: -100, 8: 3.5}},
        {"min_p": 0.1},
        {"min_p": 0.3, "temperature": 3.0, "top_k": 5},
        {"min_p": 0.05, "top_p": 0.8},
        {"repetition_penalty": 1.4, "presence_penalty": 1, "logit_bias": {7: 2}},
        {"grammar": ANY},
        {"grammar": ANY, "top_k": 5},
        {"grammar": ANY, "top_k": 30, "top_p": 0.9},
        {"grammar": ANY, "top_p": 0.6, "temperature": 2.0},
        {"grammar": ANY, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "min_p": 0.01},
        {"grammar": ANY, "temperature": 0, "logit_bias": {7: 50, 8: 100}},
        {"presence_penalty": 2, "temperature": 0},
    ],
)
def test_draws_fit_the_definition(wanted: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
    samplers = [sampler_of(SamplingParams(**wanted, seed=seed)) for seed in range(DRAWS)]
    choices = choose(np.repeat(logits[None], DRAWS, 0), samplers)
    drawn = np.array([choice.token_id for choice in choices if choice is not None])
    assert len(drawn) == DRAWS
    assert_fits(drawn, defined(logits, SamplingParams(**wanted)))
    alone = [choose(logits[None], [one])[0] for one in samplers[:50]]
    assert alone == choices[:50]


def test_log_probabilities_are_those_before_penalties_and_behind_the_grammar() -> None:
    logits = np.random.default_rng(4).normal(0, 2, VOCAB).astype(np.float32)
    found: list[Optional[float]] = []
    for grammar in (None, ANY):
        wanted = SamplingParams(grammar=grammar, logprobs=20, presence_penalty=2, seed=1)
        (choice,) = choose(logits[None], [sampler_of(wanted)])
        assert choice is not None
        assert choice.top is not None
        among = np.exp(logits[ALLOWED if grammar else slice(None)].astype(np.float64)).sum()
        assert set(choice.top) <= set(ALLOWED if grammar else range(VOCAB))
        for token_id, logprob in choice.top.items():
            assert logprob == pytest.approx(logits[token_id] - np.log(among), abs=1e-5)
        found.append(choice.logprob)
    assert None not in found


def test_a_bias_of_an_unknown_token_is_rejected() -> None:
    with pytest.raises(InvalidParameterError, match="logit_bias has the token 60"):
        sampler_of(SamplingParams(logit_bias={60: 1}))


def test_a_grammar_needs_its_matcher() -> None:
    with pytest.raises(InvalidParameterError, match="grammar"):
        RowSampler(SamplingParams(grammar=ANY), [], [], VOCAB)


@pytest.mark.parametrize(
    ("bias", "limit"),
    [
        ({1: 101}, "logit_bias is 101; it must be a number between -100 and 100"),
        ({-1: 1}, "logit_bias is -1; it must be at least 0"),
        (dict.fromkeys(range(1025), 1), "logit_bias has 1025 tokens; it may have at most 1024"),
    ],
)
def test_biases_have_limits(bias: dict[int, float], limit: str) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        SamplingParams(logit_bias=bias)
    assert str(raised.value) == limit
