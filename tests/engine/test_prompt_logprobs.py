"""Log-probabilities of prompt tokens, with a numpy model that exposes every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser import device
from glm_multiuser.sampling import Choice, known_choices
from tests.engine.driving import Asked, finish, hand_engine, run
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import (
    FAILS_AT_ONCE,
    FAILS_LATER,
    Call,
    MockRunner,
    hashed_logits,
    written,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
LONG_PROMPT = list(range(1, 31))


@pytest.fixture(scope="module", params=[MockRunner, MixedRunner])
def runner_class(request: pytest.FixtureRequest) -> type[MockRunner]:
    kind: type[MockRunner] = request.param
    return kind


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PROMPT_LOGITS", 4)


def scored(prompt: Sequence[int], user: object = "me", **params: Any) -> Asked:
    return Asked(prompt, user, **{**GREEDY, "prompt_logprobs": 2, **params})


def plain(prompt: Sequence[int], user: object = "me", **params: Any) -> Asked:
    return Asked(prompt, user, **{**GREEDY, **params})


def expected(prompt: Sequence[int], count: int = 2) -> list[Choice]:
    """Token by token."""
    choices: list[Choice] = []
    for place in range(1, len(prompt)):
        logits = hashed_logits(written(prompt[:place]))[None]
        choices += known_choices(logits, [prompt[place]], count) or []
    return choices


def assert_scored(*asked: Asked) -> None:
    for one in asked:
        request = one.request
        assert one.reason == "length"
        assert request.prompt_logprobs == expected(
            request.prompt_token_ids, request.params.prompt_logprobs or 0
        )


@pytest.mark.parametrize("length", [1, 2, 3, 10, 11, 30])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_every_token_but_the_first(length: int, count: int, runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    asked = scored(LONG_PROMPT[:length], prompt_logprobs=count)
    run(engine, asked)
    assert_scored(asked)
    assert len(asked.request.prompt_logprobs) == length - 1
    for choice in asked.request.prompt_logprobs:
        assert choice.top is not None
        assert len(choice.top) == count


def test_they_are_there_before_the_first_token(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    known = []
    asked = Asked(
        LONG_PROMPT,
        when=lambda event: known.append(len(asked.request.prompt_logprobs)),
        **GREEDY,
        prompt_logprobs=0,
    )
    run(engine, asked)
    assert known[0] == len(LONG_PROMPT) - 1


def test_without_the_field_nothing_is_recorded(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    asked = plain(LONG_PROMPT, logprobs=2)
    run(engine, asked)
    assert asked.request.prompt_logprobs == []


@pytest.mark.slow
@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=6),
    users=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    wanted=st.lists(st.sampled_from([None, 0, 2]), min_size=6, max_size=6),
    chunk=st.integers(1, 25),
    slots=st.integers(1, 3),
    resized=st.integers(0, 12),
)
def test_they_depend_on_the_prompt_alone(
    prompts: list[list[int]],
    users: list[int],
    wanted: list[Any],
    chunk: int,
    slots: int,
    resized: int,
    runner_class: type[MockRunner],
) -> None:
    engine, _ = hand_engine(slots, chunk=chunk, runner_class=runner_class)
    asked = [
        plain(prompt, user, prompt_logprobs=count)
        for prompt, user, count in zip(prompts, users, wanted)
    ]
    for one in asked:
        engine.submit(one.request)
    for _ in range(resized):
        engine.step()
    engine.resize(1 + slots % 3, lambda *args: None)
    finish(engine)
    for one in asked:
        one.wait()
    assert_scored(*[one for one in asked if one.request.params.prompt_logprobs is not None])


def test_the_whole_prompt_is_computed_and_kept_for_others(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    first, second, third = plain(LONG_PROMPT), scored(LONG_PROMPT), plain(LONG_PROMPT)
    run(engine, first, second, third)
    assert_scored(second)
    cached = [one.request.cached_tokens for one in (first, second, third)]
    assert cached == [0, 0, len(LONG_PROMPT) - 1]


@pytest.mark.parametrize("bad", [FAILS_AT_ONCE, FAILS_LATER])
def test_a_prompt_that_fails_ends_alone(bad: int, runner_class: type[MockRunner]) -> None:
    engine, runner = hand_engine(2, chunk=10, runner_class=runner_class)
    failed, good = scored([*LONG_PROMPT, bad], "bad", max_tokens=9), scored(LONG_PROMPT, "good")
    run(engine, failed, good)
    assert failed.error == "GenerationError: the logits of this request are not finite"
    assert_scored(good)
    if bad == FAILS_AT_ONCE:
        assert runner.requests_of("prefill", "mixed").count(failed.request) == 1
    after = scored(LONG_PROMPT[::-1], "bad")
    run(engine, after)
    assert_scored(after)


@pytest.mark.parametrize("steps", range(1, 8))
def test_the_slot_of_a_prompt_that_was_cancelled(
    steps: int, runner_class: type[MockRunner]
) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    gone, stays, after = scored(LONG_PROMPT, "a"), scored([7] * 25, "b"), scored([9] * 9, "c")
    for one in (gone, stays, after):
        engine.submit(one.request)
    for _ in range(steps):
        engine.step()
    engine.cancel(gone.request)
    finish(engine)
    assert gone.wait().reason == "cancelled"
    assert_scored(stays.wait(), after.wait())


def test_a_device_that_fails_in_between(runner_class: type[MockRunner]) -> None:
    def break_down(call: Call) -> None:
        if bad.request in call.requests.values() and bad.request.computed_tokens >= 5:
            raise RuntimeError("the device broke")

    engine, _ = hand_engine(2, break_down, chunk=10, runner_class=runner_class)
    bad, good = scored(LONG_PROMPT, "bad"), scored(LONG_PROMPT, "good")
    run(engine, bad)
    run(engine, good)
    assert "the device broke" in bad.error
    assert_scored(good)


# How much enters in a step, where the rows of logits are few


def test_prompts_share_the_rows_equally() -> None:
    engine, _ = hand_engine(3, chunk=20, runner_class=MixedRunner)
    first, second = scored(LONG_PROMPT, "first"), scored(LONG_PROMPT[::-1], "second")
    other = plain(LONG_PROMPT, "other")
    for one in (first, second, other):
        engine.submit(one.request)
    engine.step()
    # A row for each user, and the four that there are besides.
    assert [one.request.computed_tokens for one in (first, second)] == [3, 3]
    # The others' prompts take what room is left.
    assert other.request.computed_tokens == 14
    finish(engine)
    assert_scored(first.wait(), second.wait())


def test_alone_it_gets_all_rows() -> None:
    engine, runner = hand_engine(3, chunk=20, runner_class=MixedRunner)
    asked = scored(LONG_PROMPT, max_tokens=1)
    run(engine, asked)
    assert runner.count("mixed") == len(LONG_PROMPT) / 5


def test_nobody_starves_where_there_are_more_prompts_than_rows() -> None:
    engine, _ = hand_engine(7, chunk=5, runner_class=MixedRunner)
    decoding = plain([1], "decoding", max_tokens=60)
    run(engine, plain([2]))
    engine.submit(decoding.request)
    engine.step()
    asked = [scored(LONG_PROMPT[:8], user) for user in range(6)]
    for one in asked:
        engine.submit(one.request)
    for _ in range(2):
        engine.step()
    assert all(one.request.computed_tokens for one in asked)
    finish(engine)
    assert_scored(*[one.wait() for one in asked])
    assert decoding.wait().reason == "length"


# The numbers


def test_logits_that_are_not_finite_have_none() -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.inf
    assert known_choices(logits, [1, 2], 0) is None
    assert known_choices(logits[:1], [1], 9) is not None
