"""Failing requests and devices end exactly the affected requests."""

from __future__ import annotations

from typing import Any, Callable

import pytest

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.request import AnonymousUser, Event
from glm_multiuser.engine.step_loop import FAILED_STEPS_MAX
from glm_multiuser.errors import EngineClosedError
from tests.engine.driving import (
    LONG,
    Asked,
    FailOnce,
    alone,
    engine_with_work,
    finish,
    hand_engine,
    in_background,
    run,
    threaded_engine,
)
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, Call, Gate

# Failures


@pytest.mark.parametrize(("token", "before_it"), [(FAILS_AT_ONCE, 0), (FAILS_LATER, 3)])
@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_not_finite_end_their_own_request(
    token: int, before_it: int, sampled: bool
) -> None:
    params: dict[str, Any] = {"seed": 3, "ignore_eos": True} if sampled else LONG
    engine, _ = hand_engine(3)
    fails = Asked([1, token], max_tokens=10, **params)
    others = [Asked([number], max_tokens=10, **params) for number in (4, 5)]
    run(engine, others[0], fails, others[1])
    assert fails.error == "GenerationError: the logits of this request are not finite"
    assert len(fails.tokens) == before_it
    for other in others:
        prompt = other.request.prompt_token_ids
        assert other.token_ids == alone(prompt, max_tokens=10, **params).token_ids
        assert other.reason == "length"


@pytest.mark.parametrize("token", [FAILS_AT_ONCE, FAILS_LATER])
def test_a_slot_that_held_nan_serves_the_next_user(token: int) -> None:
    engine, _ = hand_engine(1)
    fails = Asked([1, token], user="a", max_tokens=10, **LONG)
    next_ones = [Asked([2, 3], user=user, max_tokens=10, **LONG) for user in ("a", "b")]
    run(engine, fails, *next_ones)
    assert fails.reason == "error"
    for asked in next_ones:
        assert asked.token_ids == alone([2, 3], max_tokens=10, **LONG).token_ids


def test_a_slot_that_failed_is_not_kept_for_its_user() -> None:
    engine, _ = hand_engine(3)
    run(engine, Asked([1, FAILS_AT_ONCE], user="a"), Asked([1], user="b", max_tokens=1))
    assert engine.numbers() == (0, 1, 0)


def test_no_slot_is_kept_for_nobody() -> None:
    engine, _ = hand_engine(3)
    run(engine, Asked([1], user=AnonymousUser(), max_tokens=2))
    run(engine, Asked([1], user="a", max_tokens=2))
    assert engine.numbers() == (0, 1, 0)
    assert engine._scheduler.slots.slot_of("a") == 0


def test_a_device_error_in_a_prefill_ends_that_request() -> None:
    fails, *others = (Asked([n], user=n, max_tokens=6, **LONG) for n in (1, 2, 3))
    engine, _ = hand_engine(3, FailOnce("prefill", fails))
    run(engine, others[0], fails, others[1])
    assert fails.error == (
        "GenerationError: the device failed in this request's step: the device broke"
    )
    assert fails.tokens == []
    for other in others:
        prompt = other.request.prompt_token_ids
        assert other.token_ids == alone(prompt, max_tokens=6, **LONG).token_ids


def test_prompts_that_enter_together_answer_as_alone() -> None:
    asked = [Asked([n], max_tokens=6, **LONG) for n in (1, 2, 3, 4)]
    engine, runner = hand_engine(4, most_prompts=3)
    run(engine, *asked)
    prefills = [len(call.requests) for call in runner.calls if call.kind == "prefill"]
    assert prefills == [3, 1]
    for one in asked:
        assert one.token_ids == alone(one.request.prompt_token_ids, max_tokens=6, **LONG).token_ids
    assert engine.counters.prompt_tokens == 4


def test_one_of_several_prompts_that_is_not_finite_fails_by_itself() -> None:
    asked = [Asked([n], max_tokens=6, **LONG) for n in (1, FAILS_AT_ONCE, 3)]
    engine, _ = hand_engine(3, most_prompts=3)
    run(engine, *asked)
    assert [one.reason for one in asked] == ["length", "error", "length"]


def test_a_device_error_in_a_decode_step_ends_its_requests_and_no_others() -> None:
    running = [Asked([n], max_tokens=6, **LONG) for n in (1, 2)]
    waiting = [Asked([n], max_tokens=6, **LONG) for n in (3, 4)]
    engine, runner = hand_engine(2, FailOnce("decode", running[1]))
    run(engine, *running, *waiting)
    for asked in running:
        assert asked.error.endswith("failed in this request's step: the device broke")
    assert [len(asked.tokens) for asked in running] == [2, 1]
    # Each has an error of its own: two threads that raise one object would share its traceback.
    errors = [asked.end.error for asked in running if asked.end is not None]
    assert errors[0] is not errors[1]
    for asked in waiting:
        prompt = asked.request.prompt_token_ids
        assert asked.token_ids == alone(prompt, max_tokens=6, **LONG).token_ids
    assert engine.numbers() == (0, 2, 0)
    assert not runner.closed


def test_a_device_error_in_a_decode_step_leaves_the_prompts_beside_it_alone() -> None:
    decodes, enters = (Asked([n], max_tokens=6, **LONG) for n in (1, 2))
    engine, _ = hand_engine(2, FailOnce("decode"))
    run(engine, decodes, enters)
    assert decodes.error.endswith("the device broke")
    assert decodes.token_ids == alone([1], max_tokens=1, **LONG).token_ids
    assert enters.token_ids == alone([2], max_tokens=6, **LONG).token_ids


def test_a_device_error_while_a_paused_request_comes_back_ends_that_request() -> None:
    first, second = (Asked([n], max_tokens=9, **LONG) for n in (1, 2))
    engine, _ = hand_engine(2, FailOnce("restore"))
    engine.submit(first.request)
    engine.submit(second.request)
    for _ in range(4):
        engine.step()
    engine.resize(3, lambda *args: None)
    finish(engine)
    assert first.wait().error.endswith("the device broke")
    assert second.wait().token_ids == alone([2], max_tokens=9, **LONG).token_ids


def test_sampling_that_breaks_ends_its_step_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = hand_engine(1)
    with monkeypatch.context() as patch:
        patch.setattr("glm_multiuser.engine.step_loop.choose", lambda logits, samplers: 1 / 0)
        breaks = Asked([1], seed=1)
        run(engine, breaks)
    assert breaks.error.endswith("division by zero")
    works = Asked([1], max_tokens=3, **LONG)
    run(engine, works)
    assert works.reason == "length"


def deliver_badly(at: int) -> Callable[[Event], None]:
    """A receiver that raises at its event number `at`."""
    seen: list[Event] = []

    def when(event: Event) -> None:
        seen.append(event)
        if len(seen) == at:
            raise RuntimeError("nobody is listening")

    return when


@pytest.mark.parametrize("at", [1, 3])
def test_a_receiver_that_raises_cancels_its_own_request(at: int) -> None:
    engine, _ = hand_engine(2)
    breaks = Asked([1], when=deliver_badly(at), max_tokens=8, **LONG)
    other = Asked([2], max_tokens=8, **LONG)
    run(engine, breaks, other)
    assert breaks.reason == "cancelled"
    assert len(breaks.tokens) == at - 1
    assert other.token_ids == alone([2], max_tokens=8, **LONG).token_ids


def test_a_receiver_that_raises_at_the_end_disturbs_nobody() -> None:
    engine, _ = hand_engine(1)
    breaks = Asked([1], when=deliver_badly(3), max_tokens=2, **LONG)
    other = Asked([2], max_tokens=8, **LONG)
    engine.submit(breaks.request)
    run(engine, other)
    assert other.token_ids == alone([2], max_tokens=8, **LONG).token_ids
    assert engine.numbers() == (0, 1, 0)


# A device that is gone


class FailTimes:
    """A device that fails in the first `times` calls."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, call: Call) -> None:
        self.times -= 1
        if self.times >= 0:
            raise RuntimeError("the device is gone")


def test_steps_that_fail_in_a_row_close_the_engine() -> None:
    engine, _ = hand_engine(1, FailTimes(FAILED_STEPS_MAX))
    asked = [Asked([number], max_tokens=2, **LONG) for number in range(FAILED_STEPS_MAX + 1)]
    run(engine, *asked)
    own = "GenerationError: the device failed in this request's step: the device is gone"
    assert [one.error for one in asked[:FAILED_STEPS_MAX]] == [own] * FAILED_STEPS_MAX
    assert "the engine failed and is closed" in str(asked[-1].error)
    assert "3 steps in a row" in str(engine.failure)
    with pytest.raises(EngineClosedError):
        engine.submit(Asked([1]).request)


def test_a_step_that_works_makes_the_engine_forget_those_that_failed() -> None:
    engine, _ = hand_engine(1, FailTimes(FAILED_STEPS_MAX - 1))
    for _ in range(2):
        engine.runner.before.times = FAILED_STEPS_MAX - 1  # type: ignore[attr-defined]
        asked = [Asked([number], max_tokens=2, **LONG) for number in range(FAILED_STEPS_MAX)]
        run(engine, *asked)
        assert [one.reason for one in asked] == ["error", "error", "length"]
    assert engine.failure is None


# Defects of the engine itself


def test_wrong_books_close_the_engine_and_nobody_hangs() -> None:
    engine, _ = hand_engine(2)
    engine._scheduler.slots._free.clear()
    assert not engine.step()
    with pytest.raises(EngineClosedError):
        engine.submit(Asked([1]).request)
    assert not engine.step()


def test_a_step_that_breaks_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, asked = engine_with_work(lambda call: None)
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
    assert not engine.step()
    for one in asked:
        assert one.wait().error == (
            "GenerationError: the engine failed and is closed: division by zero"
        )
    errors = {id(one.end.error) for one in asked if one.end is not None}
    assert len(errors) == 3
    assert engine.numbers() == (0, 0, 0)


def test_books_that_break_at_a_finish_do_not_lose_that_request() -> None:
    engine, _, asked = engine_with_work(lambda call: None)
    engine._scheduler.slots._busy.clear()
    finish(engine)
    assert {one.wait().reason for one in asked} == {"error"}


def test_who_waits_at_the_door_of_an_engine_that_breaks_is_told(
    device_thread: DeviceThread, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate, max_queue=0)
    running = Asked([1], **LONG)
    engine.submit(running.request)
    gate.wait()
    at_the_door = in_background(lambda: engine.submit(Asked([2]).request, wait=True))
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: 1 / 0)
    gate.open()
    with pytest.raises(EngineClosedError):
        at_the_door()
    assert running.wait().reason == "error"
