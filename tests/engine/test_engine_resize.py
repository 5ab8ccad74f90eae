"""Resizing while requests run: answers are unaffected, and a failure is rolled back."""

from __future__ import annotations

from typing import Any

import pytest

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.engine import SlotReport
from glm_multiuser.errors import EngineClosedError
from tests.engine.driving import (
    LONG,
    PATIENCE,
    Asked,
    alone,
    engine_with_work,
    finish,
    hand_engine,
    in_background,
    run,
    steps_of,
    threaded_engine,
)
from tests.engine.mock_runner import Call, Gate


@pytest.mark.parametrize("users", [1, 2, 3, 8])
@pytest.mark.parametrize("after", [1, 2, 5, 12])
def test_answers_do_not_notice_a_resize(users: int, after: int) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5, "top_p": 0.9},
        {"seed": 6, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "min_tokens": 4},
        {"seed": 8, "top_k": 4},
    ]
    engine, runner = hand_engine(3)
    asked = [Asked([n, n + 1], max_tokens=12, **params[n]) for n in range(5)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, after)
    engine.resize(users, lambda *args: None)
    finish(engine)
    assert len(runner.memory) == users
    for number, one in enumerate(asked):
        expected = alone([number, number + 1], max_tokens=12, **params[number])
        one.wait()
        assert one.reason == expected.reason
        assert [token.choice for token in one.tokens] == [token.choice for token in expected.tokens]


def test_after_a_resize_what_ran_comes_before_what_waited() -> None:
    engine, runner = hand_engine(2)
    asked = [Asked([n], user=n % 3, max_tokens=6, **LONG) for n in range(4)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    engine.resize(1, lambda *args: None)
    before = len(runner.calls)
    assert engine.numbers() == (0, 0, 4)
    finish(engine)
    after = [request for call in runner.calls[before:] for request in call.requests.values()]
    assert list(dict.fromkeys(after)) == [one.request for one in asked]
    assert runner.count("restore") == 2


def test_what_comes_back_takes_part_from_the_next_step_on() -> None:
    engine, runner = hand_engine(2)
    asked = [Asked([n], max_tokens=8, **LONG) for n in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 3)
    engine.resize(3, lambda *args: None)
    late = Asked([3], max_tokens=8, **LONG)
    engine.submit(late.request)
    before, steps = len(runner.calls), engine.counters.steps
    steps_of(engine, 2)
    first, second, third = asked[0].request, asked[1].request, late.request
    assert runner.calls[before:] == [
        Call("restore", {}, slot=0),
        Call("restore", {}, slot=1),
        Call("prefill", {2: third}),
        Call("decode", {0: first, 1: second, 2: third}),
    ]
    assert engine.counters.steps == steps + 2, "what comes back is no step"


def test_two_resizes_in_a_row_save_once() -> None:
    engine, runner = hand_engine(2)
    asked = [Asked([n], max_tokens=8, **LONG) for n in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    engine.resize(1, lambda *args: None)
    engine.step()
    assert asked[0].request.saved_past is None  # the copy on the host is gone
    engine.resize(3, lambda *args: None)
    finish(engine)
    # The first came back into the one slot and was saved again; the second was still waiting.
    assert [call.slot for call in runner.calls if call.kind == "save"] == [0, 1, 0]
    for one in asked:
        prompt = one.request.prompt_token_ids
        assert one.wait().token_ids == alone(prompt, max_tokens=8, **LONG).token_ids


def test_a_paused_request_can_be_cancelled() -> None:
    engine, runner = hand_engine(2)
    asked = [Asked([n], max_tokens=8, **LONG) for n in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    engine.resize(1, lambda *args: None)
    engine.cancel(asked[0].request)
    finish(engine)
    assert asked[0].wait().reason == "cancelled"
    assert asked[1].wait().token_ids == alone([2], max_tokens=8, **LONG).token_ids
    assert runner.count("restore") == 1


@pytest.mark.parametrize("when", ["runs", "is paused"])
def test_a_user_who_is_forgotten_stays_so_over_a_resize(when: str) -> None:
    engine, _ = hand_engine(2, chunk=4)
    asked = [Asked([n], user=n, max_tokens=8, **LONG) for n in (1, 2)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    if when == "runs":
        engine.forget(2)
    engine.resize(1, lambda *args: None)
    assert engine.numbers() == (0, 0, 2)
    if when == "is paused":
        engine.forget(2)
    finish(engine)
    assert_undisturbed(asked)
    assert engine.slots() == [SlotReport("free")]
    run(engine, Asked([2], user=2, max_tokens=8, **LONG))
    assert engine.slots() == [SlotReport("idle", 2)]


def test_the_time_in_the_queue_ends_with_the_first_slot() -> None:
    engine, _ = hand_engine(1)
    asked = Asked([1], max_tokens=8, **LONG)
    engine.submit(asked.request)
    steps_of(engine, 2)
    queued = asked.request.queued_seconds
    engine.resize(2, lambda *args: None)
    finish(engine)
    assert asked.wait().end is not None
    assert asked.end is not None
    assert asked.end.queued_seconds == queued > 0


class BadResize:
    """A device on which chosen calls of a kind fail."""

    def __init__(self, kind: str, *calls: int) -> None:
        self.kind, self.calls, self.seen = kind, calls, 0

    def __call__(self, call: Call) -> None:
        if call.kind == self.kind:
            self.seen += 1
            if self.seen in self.calls:
                raise RuntimeError(f"no memory for {call.users}")


def assert_undisturbed(asked: list[Asked]) -> None:
    for one in asked:
        prompt = one.request.prompt_token_ids
        assert one.wait().token_ids == alone(prompt, max_tokens=8, **LONG).token_ids


@pytest.mark.parametrize("users", [1, 5])
def test_a_resize_that_fails_goes_back_and_loses_nothing(users: int) -> None:
    engine, runner, asked = engine_with_work(BadResize("resize", 1))
    with pytest.raises(RuntimeError, match=f"no memory for {users}"):
        engine.resize(users, lambda *args: None)
    assert [call.users for call in runner.calls if call.kind == "resize"] == [users, 2]
    finish(engine)
    assert_undisturbed(asked)
    assert len(runner.memory) == 2
    engine.resize(3, lambda *args: None)
    run(engine, Asked([1], max_tokens=2, **LONG))


def test_a_progress_that_raises_is_not_asked_again_on_the_way_back() -> None:
    engine, runner, asked = engine_with_work(lambda call: None)

    def give_up(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.resize(5, give_up)
    finish(engine)
    assert_undisturbed(asked)
    assert len(runner.memory) == 2


def test_a_save_that_fails_changes_nothing() -> None:
    engine, runner, asked = engine_with_work(BadResize("save", 2))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.resize(4, lambda *args: None)
    assert engine.numbers() == (2, 0, 1)
    steps_of(engine, 3)
    engine.resize(1, lambda *args: None)  # what the first attempt saved is stale by now
    finish(engine)
    assert_undisturbed(asked)
    assert len(runner.memory) == 1


def test_an_engine_that_cannot_go_back_ends_every_request_and_closes() -> None:
    engine, runner, asked = engine_with_work(BadResize("resize", 1, 2))
    with pytest.raises(RuntimeError, match="no memory for 5"):
        engine.resize(5, lambda *args: None)
    for one in asked:
        assert one.wait().error == (
            "GenerationError: the engine failed and is closed: no memory for 2"
        )
    with pytest.raises(EngineClosedError):
        engine.submit(Asked([1]).request)
    with pytest.raises(EngineClosedError):
        engine.resize(2, lambda *args: None)
    assert not engine.step()
    assert engine.numbers() == (0, 0, 0)
    engine.close(drain=PATIENCE)
    assert runner.closed


def test_a_resize_waits_for_the_step_that_runs(device_thread: DeviceThread, gate: Gate) -> None:
    engine, runner = threaded_engine(device_thread, 2, gate)
    asked = Asked([1], max_tokens=4, **LONG)
    engine.submit(asked.request)
    gate.wait()
    join = in_background(lambda: engine.resize(3, lambda *args: None))
    gate.open()
    join()
    assert asked.wait().token_ids == alone([1], max_tokens=4, **LONG).token_ids
    assert len(runner.memory) == 3
    assert len(runner.threads) == 1
