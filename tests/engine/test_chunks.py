"""Chunked prefill of causal prompts beside others' decode steps, after the cached prefix.

With a runner that has separate graphs for prefill and decode, and one that mixes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.engine.request import AnonymousUser
from glm_multiuser.engine.slots import Slots
from tests.engine.driving import Asked, alone, finish, hand_engine, run
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, Call, MockRunner

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG_PROMPT = list(range(1, 31))


def greedy(prompt: Sequence[int], user: object = "me", **params: Any) -> Asked:
    return Asked(prompt, user, **{"max_tokens": 4, **GREEDY, **params})


@pytest.fixture(scope="module", params=[MockRunner, MixedRunner])
def runner_class(request: pytest.FixtureRequest) -> type[MockRunner]:
    kind: type[MockRunner] = request.param
    return kind


def cached(asked: Asked) -> int:
    return asked.request.cached_tokens


# Chunks


def test_a_long_prompt_enters_beside_the_decode_steps_of_the_others(
    runner_class: type[MockRunner],
) -> None:
    engine, runner = hand_engine(2, chunk=10, runner_class=runner_class)
    other, long = greedy([1], "other", max_tokens=9), greedy(LONG_PROMPT, "long")
    engine.submit(other.request)
    engine.step()
    engine.submit(long.request)
    while not long.look().tokens:
        engine.step()
    assert [(call.kind, len(call.requests)) for call in runner.calls] == (
        [("mixed", 1)] + [("mixed", 2)] * 3
        if runner_class is MixedRunner
        else [("prefill", 1)] + [("prefill", 1), ("decode", 1)] * 3
    )
    assert len(other.look().token_ids) == 4
    finish(engine)
    for asked, prompt in ((other, [1]), (long, LONG_PROMPT)):
        count = asked.request.max_tokens
        assert asked.wait().token_ids == alone(prompt, max_tokens=count, **GREEDY).token_ids
    assert engine.counters.prompt_tokens == 1 + len(LONG_PROMPT)


def test_prompts_of_several_chunks_take_turns(runner_class: type[MockRunner]) -> None:
    engine, runner = hand_engine(3, chunk=10, runner_class=runner_class)
    first, second = greedy(LONG_PROMPT, "first"), greedy(LONG_PROMPT[::-1], "second")
    short = greedy([5], "short")
    for asked in (first, second, short):
        engine.submit(asked.request)
    while not short.look().tokens:
        engine.step()
    turns = [first, second, short]
    if runner_class is MixedRunner:
        turns.append(first)  # the short one leaves room beside it
    assert runner.requests_of("prefill", "mixed") == [one.request for one in turns]
    assert [one.request.computed_tokens for one in (first, second)] == [
        10 if runner_class is MockRunner else 19,
        10,
    ]
    finish(engine)
    assert first.wait().token_ids == alone(LONG_PROMPT, max_tokens=4, **GREEDY).token_ids
    assert second.wait().token_ids == alone(LONG_PROMPT[::-1], max_tokens=4, **GREEDY).token_ids


def test_cancelling_in_the_middle_of_a_prompt_frees_the_slot_and_keeps_what_is_in(
    runner_class: type[MockRunner],
) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    asked = greedy(LONG_PROMPT)
    engine.submit(asked.request)
    engine.step()
    engine.cancel(asked.request)
    engine.step()
    assert asked.look().reason == "cancelled"
    assert engine.numbers() == (0, 1, 0)
    again = greedy(LONG_PROMPT)
    run(engine, again)
    assert cached(again) == 10
    assert again.token_ids == alone(LONG_PROMPT, max_tokens=4, **GREEDY).token_ids


@pytest.mark.parametrize("steps", range(5))
def test_a_resize_in_the_middle_of_a_prompt(steps: int, runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    asked = greedy(LONG_PROMPT)
    engine.submit(asked.request)
    for _ in range(steps):
        engine.step()
    engine.resize(1, lambda *args: None)
    finish(engine)
    assert asked.wait().token_ids == alone(LONG_PROMPT, max_tokens=4, **GREEDY).token_ids
    assert engine.counters.prompt_tokens == len(LONG_PROMPT), "what was in was not lost"


def test_a_device_error_in_a_chunk_ends_that_request_alone(runner_class: type[MockRunner]) -> None:
    def break_down(call: Call) -> None:
        second_chunk = bad.request.computed_tokens == 10
        if bad.request in call.requests.values() and second_chunk:
            raise RuntimeError("the device broke")

    engine, _ = hand_engine(2, break_down, chunk=10, runner_class=runner_class)
    bad, good = greedy(LONG_PROMPT, "bad"), greedy(LONG_PROMPT, "good")
    run(engine, bad, good)
    assert "the device broke" in bad.error
    assert good.token_ids == alone(LONG_PROMPT, max_tokens=4, **GREEDY).token_ids
    after = greedy(LONG_PROMPT, "bad")
    run(engine, after)
    assert cached(after) == 0
    assert after.token_ids == good.token_ids


# Reuse


def turn(engine: Any, prompt: Sequence[int], user: object = "me", **params: Any) -> Asked:
    asked = greedy(prompt, user, **params)
    run(engine, asked)
    expected = alone(prompt, max_tokens=4, **GREEDY)
    assert asked.token_ids == expected.token_ids
    return asked


def test_the_next_turn_starts_behind_the_last_one(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    history: list[int] = []
    for number in range(4):
        history += [10 + number, 20 + number, 30 + number]
        before = len(history)
        asked = turn(engine, history)
        # The last token of an answer was handed out, but never went through the model.
        assert cached(asked) == (0 if number == 0 else before - 3 - 1)
        assert asked.end is not None
        history += asked.token_ids


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (LONG_PROMPT, 29),  # the same again
        ([*LONG_PROMPT, 7, 7], 30),
        ([*LONG_PROMPT[:12], 40, *LONG_PROMPT[13:]], 12),  # edited
        (LONG_PROMPT[:8], 7),  # shorter
        ([40, 41], 0),
        ([1], 0),
    ],
)
def test_what_has_changed_since_is_computed_again(
    then: list[int], expected: int, runner_class: type[MockRunner]
) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    turn(engine, LONG_PROMPT)
    assert cached(turn(engine, then)) == expected
    turn(engine, LONG_PROMPT)


def test_nobody_gets_what_somebody_else_wrote(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    turn(engine, LONG_PROMPT, "a")
    assert cached(turn(engine, LONG_PROMPT, "b")) == 0
    assert cached(turn(engine, LONG_PROMPT, AnonymousUser())) == 0
    # The third user got the slot of the one who was away for longest.
    assert cached(turn(engine, LONG_PROMPT, "a")) == 0


def test_requests_that_name_no_user_share_nothing(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    for _ in range(2):
        assert cached(turn(engine, LONG_PROMPT, AnonymousUser())) == 0


def test_reuse_can_be_switched_off_for_a_request(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, chunk=10, runner_class=runner_class)
    turn(engine, LONG_PROMPT)
    assert cached(turn(engine, LONG_PROMPT, cache_prompt=False)) == 0
    assert cached(turn(engine, LONG_PROMPT)) == 29


@pytest.mark.parametrize("bad", [FAILS_AT_ONCE, FAILS_LATER])
def test_a_slot_that_failed_is_not_reused(bad: int, runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    failed = greedy([*LONG_PROMPT, bad], max_tokens=9)
    run(engine, failed)
    assert "not finite" in failed.error
    assert cached(turn(engine, LONG_PROMPT)) == 0


def test_a_resize_forgets_what_idle_users_held(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(2, chunk=10, runner_class=runner_class)
    turn(engine, LONG_PROMPT)
    engine.resize(3, lambda *args: None)
    assert cached(turn(engine, LONG_PROMPT)) == 0


def test_a_whole_prompt_model_reuses_nothing(runner_class: type[MockRunner]) -> None:
    engine, _ = hand_engine(1, runner_class=runner_class)
    turn(engine, LONG_PROMPT)
    assert cached(turn(engine, LONG_PROMPT)) == 0


@pytest.mark.slow
@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=1, max_size=6),
    users=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    chunk=st.integers(1, 25),
    slots=st.integers(1, 3),
)
def test_chunks_and_reuse_change_no_answer(
    prompts: list[list[int]],
    users: list[int],
    chunk: int,
    slots: int,
    runner_class: type[MockRunner],
) -> None:
    engine, _ = hand_engine(slots, chunk=chunk, runner_class=runner_class)
    for prompt, user in zip(prompts, users):
        turn(engine, prompt, user)


# The books


def test_slots_forget_what_a_user_held_with_the_slot() -> None:
    slots = Slots(1)
    slots.acquire("a")
    slots.release("a", held=(1, 2))
    assert slots.held("a") == (1, 2)
    slots.acquire("b")
    assert slots.held("a") == slots.held("b") == ()
    slots.check()


def test_a_leftover_in_the_books_is_found() -> None:
    slots = Slots(1)
    slots._held["a"] = (1, 2)
    with pytest.raises(RuntimeError, match="without a slot"):
        slots.check()
