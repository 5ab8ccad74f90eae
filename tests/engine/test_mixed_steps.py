"""The engine with a runner that mixes prefill and decode rows in one call, like native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.step_loop import FAILED_STEPS_MAX, StepReport
from tests.engine.driving import Asked, alone, finish, hand_engine, run
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, Call
from tests.engine.scheduling import new_request

LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Answers of maximum length."""

mixed_engine = partial(hand_engine, runner_class=MixedRunner)


def asks(*prompts: list[int], max_tokens: int = 6) -> list[Asked]:
    return [Asked(prompt, max_tokens=max_tokens, **LONG) for prompt in prompts]


def assert_undisturbed(*asked: Asked) -> None:
    for one in asked:
        request = one.request
        expected = alone(request.prompt_token_ids, max_tokens=request.params.max_tokens, **LONG)
        assert one.token_ids == expected.token_ids
        assert one.reason == "length"


class FailWith:
    """A device that breaks in the first call in which two certain requests take part."""

    def __init__(self, *asked: Asked) -> None:
        self.requests, self.failed = {one.request for one in asked}, False

    def __call__(self, call: Call) -> None:
        if self.requests <= {*call.requests.values()} and not self.failed:
            self.failed = True
            raise RuntimeError("the device broke")


# How much enters


def taken(runner: MixedRunner, lengths: list[tuple[int, int]]) -> list[int]:
    requests = []
    for length, computed in lengths:
        request = new_request(length=length)
        request.computed_tokens = computed
        requests.append(request)
    return list(runner.chunk_sizes(requests, 0))


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([(3, 0)], [3]),
        ([(30, 0), (3, 0)], [10]),
        ([(3, 0), (30, 0), (3, 0)], [3, 7]),
        ([(3, 0), (4, 0), (3, 0), (1, 0)], [3, 4, 3]),
        ([(30, 28), (30, 5)], [2, 8]),
    ],
)
def test_prompts_of_a_causal_model_fill_the_room(
    lengths: list[tuple[int, int]], counts: list[int]
) -> None:
    assert taken(MixedRunner(1, chunk=10), lengths) == counts


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([3], [3]),
        ([3, 30, 3], [3]),
        ([6, 6, 1], [6, 6]),
        ([6, 5, 1, 1], [6, 5, 1]),
        ([12, 1], [12]),
    ],
)
def test_prompts_that_are_not_cut_enter_if_they_fit(lengths: list[int], counts: list[int]) -> None:
    assert MixedRunner.WHOLE_ROOM == 12
    assert taken(MixedRunner(1), [(length, 0) for length in lengths]) == counts


def test_a_longer_one_goes_through_some_layers_in_each_call() -> None:
    engine, runner = mixed_engine(3)
    first, long, short = asks([1], [2] * 30, [3], max_tokens=9)
    engine.submit(first.request)
    engine.step()
    run(engine, long, short)
    calls = [call.requests.values() for call in runner.calls]
    assert [long.request in call for call in calls[:5]] == [False, True, True, True, True]
    assert [short.request in call for call in calls[:5]] == [False, False, False, False, True]
    assert all(first.request in call for call in calls[:9]), "no request waits for the long prompt"
    assert engine.counters.prompt_tokens == 32
    assert_undisturbed(first.wait(), long, short)


def test_a_longer_one_that_goes_away_in_between_is_noticed_by_nobody() -> None:
    engine, _ = mixed_engine(3)
    left, long = asks([2] * 30, [3] * 20)
    for one in (left, long):
        engine.submit(one.request)
    engine.step()
    engine.cancel(left.request)
    finish(engine)
    assert left.wait().reason == "cancelled"
    assert_undisturbed(long.wait())


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.floats(0, 0.99)).map(
            lambda pair: (pair[0], int(pair[0] * pair[1]))
        ),
        min_size=1,
        max_size=8,
    ),
    room=st.integers(1, 25),
)
def test_a_causal_room_is_never_exceeded_and_never_left_empty(
    lengths: list[tuple[int, int]], room: int
) -> None:
    counts = taken(MixedRunner(1, chunk=room), lengths)
    rests = [length - computed for length, computed in lengths]
    assert sum(counts) == min(room, sum(rests))
    assert all(counts)
    assert counts[:-1] == rests[: len(counts) - 1], "only the last prompt is cut"


class AsksOften(MixedRunner):
    """Is asked in between what else it would take."""

    def chunk_sizes(self, prompts: Sequence[Request], decoding: int) -> Sequence[int]:
        for others in (prompts, prompts[::-1], prompts[1:], prompts[:1]):
            if others:
                super().chunk_sizes(others, decoding)
        counts = super().chunk_sizes(prompts, decoding)
        assert super().chunk_sizes(prompts, decoding) == counts
        return counts


@pytest.mark.parametrize("chunk", [None, 4])
def test_asking_what_would_enter_changes_nothing(chunk: Any) -> None:
    calls = []
    for runner_class in (MixedRunner, AsksOften):
        asked = asks([1], [2] * 30, [3] * 5, [4] * 20, [5] * 3)
        engine, runner = hand_engine(3, chunk=chunk, runner_class=runner_class)
        run(engine, *asked)
        assert_undisturbed(*asked)
        who = {one.request: number for number, one in enumerate(asked)}
        calls.append([[who[one] for one in call.requests.values()] for call in runner.calls])
    assert calls[0] == calls[1]


# Steps


def test_one_call_has_prompts_and_decode_rows() -> None:
    engine, runner = mixed_engine(4, chunk=10)
    reports: list[StepReport] = []
    engine.on_step = reports.append
    first, *others = asks([1], list(range(1, 8)), list(range(2, 10)), [5])
    engine.submit(first.request)
    engine.step()
    for one in others:
        engine.submit(one.request)
    finish(engine)
    long, cut, short = (one.request for one in others)
    assert [list(call.requests.values()) for call in runner.calls[:3]] == [
        [first.request],
        [long, cut, first.request],
        [short, cut, first.request, long],
    ]
    assert {call.kind for call in runner.calls} == {"mixed"}
    assert [(one.kind, one.rows) for one in reports[:4]] == [
        ("prefill", 1),
        ("mixed", 3),
        ("mixed", 4),
        ("decode", 4),
    ]
    assert engine.counters.steps == len(runner.calls) == len(reports)
    assert engine.counters.prompt_tokens == 1 + 7 + 8 + 1
    assert_undisturbed(*(one.wait() for one in (first, *others)))


@pytest.mark.parametrize("chunk", [None, 1, 3, 10])
def test_prompts_that_enter_together_answer_as_alone(chunk: Any) -> None:
    asked = asks([1, 2, 3, 4], [2], [3, 4], [4] * 14, [1, 2, 3, 5])
    engine, _ = mixed_engine(3, chunk=chunk)
    run(engine, *asked)
    assert_undisturbed(*asked)


def test_a_slot_is_handed_on_with_what_the_last_user_left_in_it() -> None:
    engine, runner = mixed_engine(1)
    run(engine, *asks(list(range(1, 10)), max_tokens=20))
    runner.memory[:] += 1.5  # as no other request would have written it
    run(engine, *asks([FAILS_LATER, *range(1, 10)], max_tokens=20))
    later = asks([3, 4], max_tokens=20)
    run(engine, *later)
    assert_undisturbed(*later)


# Failures


@pytest.mark.parametrize(("token", "before_it"), [(FAILS_AT_ONCE, 0), (FAILS_LATER, 3)])
@pytest.mark.parametrize("chunk", [None, 2])
def test_logits_that_are_not_finite_end_their_own_request(
    token: int, before_it: int, chunk: Any
) -> None:
    first, fails, second = asks([1, 2, 3], [1, token, 3], [4, 5, 6], max_tokens=9)
    engine, _ = mixed_engine(3, chunk=chunk)
    run(engine, first, fails, second)
    assert fails.error == "GenerationError: the logits of this request are not finite"
    assert len(fails.tokens) == before_it
    assert_undisturbed(first, second)


def test_a_device_error_ends_whoever_was_in_the_step_and_nobody_else() -> None:
    decodes, enters, has_no_turn, waits = asks([1], [2] * 6, [3] * 9, [4])
    engine, runner = mixed_engine(3, FailWith(decodes, enters), chunk=6)
    engine.submit(decodes.request)
    engine.step()
    run(engine, enters, has_no_turn, waits)
    for one in (decodes.wait(), enters):
        assert one.error.endswith("failed in this request's step: the device broke")
    assert (len(decodes.tokens), len(enters.tokens)) == (1, 0)
    assert has_no_turn.request in runner.requests_of("mixed")
    assert_undisturbed(has_no_turn, waits)
    assert engine.failure is None


def test_a_restore_that_fails_ends_its_request_alone() -> None:
    first, second = asks([1], [2], max_tokens=9)

    def break_down(call: Call) -> None:
        if call.kind == "restore" and call.slot == 0:
            raise RuntimeError("the device broke")

    engine, _ = mixed_engine(2, break_down, chunk=4)
    for one in (first, second):
        engine.submit(one.request)
    for _ in range(3):
        engine.step()
    engine.resize(3, lambda *args: None)
    finish(engine)
    assert first.wait().error.endswith("the device broke")
    assert_undisturbed(second.wait())
    assert engine.counters.steps == second.request.max_tokens


def test_steps_that_fail_in_a_row_close_the_engine() -> None:
    def break_down(call: Call) -> None:
        raise RuntimeError("the device is gone")

    engine, _ = mixed_engine(1, break_down)
    asked = asks(*([number] for number in range(FAILED_STEPS_MAX + 1)))
    run(engine, *asked)
    assert "the engine failed and is closed" in asked[-1].error
    assert "3 steps in a row" in str(engine.failure)


# Resizing


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("users", [1, 2, 5])
@pytest.mark.parametrize("after", range(1, 6))
def test_answers_do_not_notice_a_resize(users: int, after: int, chunk: Any) -> None:
    engine, _ = mixed_engine(3, chunk=chunk)
    asked = asks(*([n] * (5 * n + 1) for n in range(5)), max_tokens=8)
    for one in asked:
        engine.submit(one.request)
    for _ in range(after):
        engine.step()
    engine.resize(users, lambda *args: None)
    finish(engine)
    assert_undisturbed(*(one.wait() for one in asked))
    assert engine.counters.prompt_tokens == sum(len(one.request.prompt_token_ids) for one in asked)
