"""What SamplingParams accepts, refuses and says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.sampling import RowSampler
from glm_multiuser.sampling_params import SamplingParams
from glm_multiuser.structured.grammar import Grammar


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 5},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 5e-324},
        {"temperature": 100},
        {"top_k": 0},
        {"top_k": 10**30},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 100.0},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"stop": ["x" * 256] * 16},
        {"stop_token_ids": [0, 10**30]},
        {"ignore_eos": True},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20},
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100, 10**9: 100.0}},
        {"logit_bias": ((1, 2.0),)},
        {"grammar": Grammar.json_object()},
    ],
)
def test_accepts(settings: dict[str, Any]) -> None:
    SamplingParams(**settings)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("max_tokens", 0, "at least 1"),
        ("min_p", 1.1, "at least 0 and at most 1"),
        ("min_p", math.nan, "at least 0 and at most 1"),
        ("presence_penalty", 2.1, "between -2 and 2"),
        ("frequency_penalty", math.nan, "between -2 and 2"),
        ("frequency_penalty", "1", "between -2 and 2"),
        ("logit_bias", [1], "a mapping"),
        ("grammar", "a", "a Grammar"),
        ("max_tokens", -3, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("max_tokens", 1.0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", None, "at least 0"),
        ("temperature", -0.1, "at least 0 and at most 100"),
        ("temperature", 100.1, "at least 0 and at most 100"),
        ("temperature", math.nan, "at least 0 and at most 100"),
        ("temperature", math.inf, "at least 0 and at most 100"),
        ("temperature", "1", "at least 0 and at most 100"),
        ("temperature", False, "at least 0 and at most 100"),
        ("temperature", None, "at least 0 and at most 100"),
        ("top_k", -1, "at least 0"),
        ("top_k", 2.0, "at least 0"),
        ("top_k", True, "at least 0"),
        ("top_p", 0, "more than 0 and at most 1"),
        ("top_p", 1.0001, "more than 0 and at most 1"),
        ("top_p", math.nan, "more than 0 and at most 1"),
        ("repetition_penalty", 0.0, "more than 0 and at most 100"),
        ("repetition_penalty", -1.0, "more than 0 and at most 100"),
        ("repetition_penalty", math.inf, "more than 0 and at most 100"),
        ("repetition_penalty", 10**400, "more than 0 and at most 100"),
        ("seed", -1, "between 0 and 9223372036854775807"),
        ("seed", 2**63, "between 0 and 9223372036854775807"),
        ("seed", 0.5, "between 0 and 9223372036854775807"),
        ("stop", None, "a list or a tuple"),
        ("stop", b"end", "a list or a tuple"),
        ("stop", {"end"}, "a list or a tuple"),
        ("stop_token_ids", "12", "a list or a tuple"),
        ("stop_token_ids", 12, "a list or a tuple"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", -1, "between 0 and 20"),
        ("logprobs", 21, "between 0 and 20"),
        ("logprobs", True, "between 0 and 20"),
        ("prompt_logprobs", -1, "between 0 and 20"),
        ("prompt_logprobs", 21, "between 0 and 20"),
        ("prompt_logprobs", 1.0, "between 0 and 20"),
    ],
)
def test_a_refusal_names_field_value_and_limit(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidParameterError) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field
    message = str(refusal.value)
    assert message.startswith(f"{field} is {repr(value)[:70]}")
    assert message.endswith(limit)
    assert len(message) < 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_tokens": 3, "min_tokens": 4},
            "min_tokens is 4; it must be at most max_tokens, which is 3",
        ),
        ({"stop": ["x"] * 17}, "stop has 17 texts; it may have at most 16"),
        ({"stop": ""}, "stop[0] is ''; it must be a text of 1 to 256 characters"),
        ({"stop": ["a", ""]}, "stop[1] is ''; it must be a text of 1 to 256 characters"),
        ({"stop": [1]}, "stop[0] is 1; it must be a text of 1 to 256 characters"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1] is -1; it must be at least 0"),
        (
            {"logit_bias": (1,)},
            "logit_bias[0] is 1; it must be a tuple of a token id and a number",
        ),
        (
            {"logit_bias": ((1, 2.0), (1,))},
            "logit_bias[1] is (1,); it must be a tuple of a token id and a number",
        ),
        (
            {"stop_token_ids": [True]},
            "stop_token_ids[0] is True; it must be an integer, at least 0",
        ),
    ],
)
def test_refusals_within_lists_and_between_fields(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError) as refusal:
        SamplingParams(**settings)
    assert str(refusal.value) == message
    assert refusal.value.field in settings


def test_a_long_value_is_not_repeated_whole() -> None:
    text: Any = "x" * 257
    with pytest.raises(InvalidParameterError, match=r"stop\[0\] is 'x{76}\.\.\.; it must"):
        SamplingParams(stop=text)
    with pytest.raises(InvalidParameterError, match="seed is <int>; it must be between 0 and"):
        SamplingParams(seed=10**5000)


def test_stop_becomes_a_tuple() -> None:
    text: Any = "end"
    texts: Any = ["a", "b"]
    token_ids: Any = [2, 3]
    assert SamplingParams(stop=text).stop == ("end",)
    assert SamplingParams(stop=texts).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=token_ids).stop_token_ids == (2, 3)


def test_params_are_values() -> None:
    texts: Any = ["a"]
    params = SamplingParams(stop=texts, seed=1)
    assert params == SamplingParams(stop=("a",), seed=1)
    assert hash(params) == hash(SamplingParams(stop=("a",), seed=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "seed": 1}, False),
        ({"temperature": 0.5}, True),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, True),
        ({"temperature": 0.0, "logprobs": 0}, True),
    ],
)
def test_needs_logits(settings: dict[str, Any], needs: bool) -> None:
    assert RowSampler(SamplingParams(**settings), [1], [2], 10).needs_logits(3) is needs


def test_needs_logits_while_min_tokens_hold_a_stop_token_back() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    sampler = RowSampler(params, [], [2], 10)
    seen = []
    for token in (5, 6, 7):
        seen.append(sampler.needs_logits(3))
        sampler.accept(token)
    assert seen == [True, True, False]
    assert not RowSampler(params, [], [], 10).needs_logits(3)


def test_min_tokens_need_a_token_that_does_not_stop() -> None:
    with pytest.raises(
        InvalidParameterError, match="min_tokens is 1; it must be 0 where all 3"
    ) as caught:
        RowSampler(SamplingParams(min_tokens=1), [], [0, 1, 2], 3)
    assert caught.value.field == "min_tokens"
