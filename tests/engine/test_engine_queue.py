"""Waiting and cancelled requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.waiting import WaitingQueue
from glm_multiuser.errors import QueueFullError, UserBusyError
from tests.engine.driving import (
    LONG,
    Asked,
    alone,
    finish,
    hand_engine,
    in_background,
    run,
    threaded_engine,
    wait_until,
)
from tests.engine.mock_runner import Call, Gate

# Cancelling


def test_cancel_while_waiting() -> None:
    engine, runner = hand_engine(1)
    running, waiting = Asked([1], max_tokens=5, **LONG), Asked([2], max_tokens=5, **LONG)
    engine.submit(running.request)
    engine.submit(waiting.request)
    engine.step()
    engine.cancel(waiting.request)
    engine.step()
    assert waiting.look().reason == "cancelled"
    assert waiting.tokens == []
    assert waiting.end is not None
    assert waiting.end.queued_seconds == waiting.end.total_seconds
    finish(engine)
    assert running.wait().reason == "length"
    assert runner.count("prefill") == 1


def test_cancel_at_once() -> None:
    engine, runner = hand_engine(1)
    asked = Asked([1], **LONG)
    engine.submit(asked.request)
    engine.cancel(asked.request)
    finish(engine)
    assert asked.wait().reason == "cancelled"
    assert runner.calls == []


def test_steps_search_a_long_queue_only_after_a_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = WaitingQueue.__iter__

    def counted(queue: WaitingQueue) -> Iterator[Request]:
        searches.append(queue)
        return search(queue)

    monkeypatch.setattr(WaitingQueue, "__iter__", counted)
    engine, _ = hand_engine(1)
    asked = [Asked([n], **LONG) for n in range(1, 20)]
    for one in asked:
        engine.submit(one.request)
    for _ in range(3):
        engine.step()
    assert searches == []
    engine.cancel(asked[7].request)
    engine.step()
    assert asked[7].look().reason == "cancelled"
    assert len(searches) == 1
    engine.step()
    assert len(searches) == 1


def test_cancel_before_it_was_submitted() -> None:
    engine, runner = hand_engine(1)
    asked = Asked([1], **LONG)
    engine.cancel(asked.request)
    run(engine, asked)
    assert asked.reason == "cancelled"
    assert runner.calls == []


def test_cancel_while_running_frees_the_slot_at_the_next_step() -> None:
    engine, runner = hand_engine(1)
    first, second = Asked([1], max_tokens=50, **LONG), Asked([2], max_tokens=5, **LONG)
    engine.submit(first.request)
    engine.submit(second.request)
    for _ in range(4):
        engine.step()
    engine.cancel(first.request)
    engine.step()
    assert first.look().reason == "cancelled"
    assert first.token_ids == alone([1], max_tokens=4, **LONG).token_ids
    assert runner.calls[-1] == Call("prefill", {0: second.request})
    finish(engine)
    assert second.wait().token_ids == alone([2], max_tokens=5, **LONG).token_ids


def test_cancel_during_a_step_frees_the_slot_within_two(
    device_thread: DeviceThread, gate: Gate
) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate)
    first, second = Asked([1], max_tokens=50, **LONG), Asked([2], max_tokens=1, **LONG)
    engine.submit(first.request)
    assert gate.wait() == Call("prefill", {0: first.request})
    gate.let_pass()
    assert gate.wait() == Call("decode", {0: first.request})
    engine.submit(second.request)
    engine.cancel(first.request)  # while its row is in the graph
    gate.let_pass()
    assert gate.wait() == Call("prefill", {0: second.request})
    assert first.wait().reason == "cancelled"
    assert len(first.tokens) == 2
    gate.let_pass()
    assert second.wait().token_ids == alone([2], max_tokens=1, **LONG).token_ids


def test_cancel_twice_and_after_the_end_is_harmless() -> None:
    engine, _ = hand_engine(1)
    asked = Asked([1], max_tokens=50, **LONG)
    engine.submit(asked.request)
    engine.step()
    for _ in range(2):
        engine.cancel(asked.request)
    finish(engine)
    assert asked.wait().reason == "cancelled"
    ended = Asked([2], max_tokens=2, **LONG)
    run(engine, ended)
    engine.cancel(ended.request)
    finish(engine)
    assert ended.reason == "length"
    ended.look()
    assert engine.numbers() == (0, 1, 0)


def test_a_cancelled_user_keeps_an_idle_slot() -> None:
    engine, _ = hand_engine(2)
    asked = Asked([1], user="a", **LONG)
    engine.submit(asked.request)
    engine.step()
    engine.cancel(asked.request)
    finish(engine)
    assert engine.numbers() == (0, 1, 0)


# The queue


def test_a_second_request_of_a_busy_user_waits_and_others_pass() -> None:
    engine, runner = hand_engine(3)
    first, second, other = (
        Asked([n], user=user, max_tokens=4, **LONG) for n, user in ((1, "a"), (2, "a"), (3, "b"))
    )
    run(engine, first, second, other)
    assert runner.requests_of("prefill") == [first.request, other.request, second.request]
    for call in runner.calls:
        users = [request.user for request in call.requests.values()]
        assert len(users) == len(set(users))


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    engine, _ = hand_engine(2, max_queue=3)
    accepted = [Asked([n], max_tokens=3, **LONG) for n in range(5)]
    for asked in accepted:
        engine.submit(asked.request)
    with pytest.raises(QueueFullError, match="5 requests are waiting; max_queue is 3"):
        engine.submit(Asked([9]).request)
    finish(engine)
    for asked in accepted:
        prompt = asked.request.prompt_token_ids
        assert asked.wait().token_ids == alone(prompt, max_tokens=3, **LONG).token_ids
    run(engine, Asked([9]))


def test_the_queue_counts_only_what_really_waits() -> None:
    engine, _ = hand_engine(2, max_queue=1)
    asked = [Asked([n], max_tokens=9, **LONG) for n in range(3)]
    for one in asked[:2]:
        engine.submit(one.request)
        engine.step()
        engine.step()
    engine.submit(asked[2].request)
    with pytest.raises(QueueFullError, match="1 requests are waiting; max_queue is 1"):
        engine.submit(Asked([9]).request)
    finish(engine)
    assert [one.wait().reason for one in asked] == ["length"] * 3


def test_a_busy_user_is_refused_and_loses_nothing() -> None:
    engine, _ = hand_engine(2, max_queue_per_user=2)
    accepted = [Asked([n], user="a", max_tokens=3, **LONG) for n in range(2)]
    for asked in accepted:
        engine.submit(asked.request)
    with pytest.raises(UserBusyError, match=r"'a' has 2 requests waiting; max_queue_per_user is 2"):
        engine.submit(Asked([9], user="a").request)
    other = Asked([5], user="b", max_tokens=3, **LONG)
    run(engine, other)
    for asked in [*accepted, other]:
        prompt = asked.request.prompt_token_ids
        expected = alone(prompt, max_tokens=3, **LONG)
        if asked.end is None:
            asked.wait()
        assert asked.token_ids == expected.token_ids


def test_a_long_queue_does_not_make_submit_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = hand_engine(1)

    def searched(queue: WaitingQueue) -> None:
        raise AssertionError("the whole queue is searched")

    monkeypatch.setattr(WaitingQueue, "__iter__", searched)
    for number in range(20):
        engine.submit(Asked([1], f"user {number}", **LONG).request)
    assert engine.numbers()[2] == 20


def test_a_request_that_waits_for_admission_is_admitted_when_there_is_room(
    device_thread: DeviceThread, gate: Gate
) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate, max_queue=0)
    first, second = Asked([1], max_tokens=2, **LONG), Asked([2], max_tokens=2, **LONG)
    engine.submit(first.request)
    gate.wait()  # so it has its slot, and there is no room
    with pytest.raises(QueueFullError):
        engine.submit(second.request)
    join = in_background(lambda: engine.submit(second.request, wait=True))
    gate.open()
    join()
    assert second.wait().token_ids == alone([2], max_tokens=2, **LONG).token_ids
    assert first.wait().reason == "length"


def test_a_larger_engine_has_room_at_once(device_thread: DeviceThread, gate: Gate) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate, max_queue=0)
    first, second = Asked([1], max_tokens=5, **LONG), Asked([2], max_tokens=5, **LONG)
    engine.submit(first.request)
    gate.wait()
    join = in_background(lambda: engine.submit(second.request, wait=True))
    grow = in_background(lambda: engine.resize(2, lambda *what: None))
    wait_until(lambda: device_thread._calls)
    kind = ""
    while kind != "restore":
        gate.let_pass()
        kind = gate.wait().kind
    join()  # while the first is still running
    gate.open()
    grow()
    assert first.wait().token_ids == alone([1], max_tokens=5, **LONG).token_ids
    assert second.wait().token_ids == alone([2], max_tokens=5, **LONG).token_ids


def test_a_cancelled_request_makes_room_at_the_door(
    device_thread: DeviceThread, gate: Gate
) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate, max_queue=1)
    running, waiting, third = (Asked([n], max_tokens=5, **LONG) for n in (1, 2, 3))
    engine.submit(running.request)
    gate.wait()
    engine.submit(waiting.request)
    join = in_background(lambda: engine.submit(third.request, wait=True))
    engine.cancel(waiting.request)
    gate.let_pass()
    join()
    gate.open()
    assert waiting.wait().reason == "cancelled"
    assert third.wait().reason == "length"
    assert running.wait().reason == "length"
