"""The engine with a model in numpy: how requests end, and that no end touches another request.

Most tests step the engine by hand. Those about threads hold its runner at a gate, so that nothing
here depends on time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import pytest

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.engine import Engine, SlotReport
from glm_multiuser.engine.request import AnonymousUser, Event
from glm_multiuser.engine.step_loop import FAILED_STEPS_MAX, StepReport
from glm_multiuser.errors import EngineClosedError, QueueFullError, UserBusyError
from glm_multiuser.sampling import Choice, RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams
from tests.engine.driving import PATIENCE, Asked, alone, finish, hand_engine, run, wait_until
from tests.engine.mock_runner import (
    EOS,
    FAILS_AT_ONCE,
    FAILS_LATER,
    VOCAB,
    Call,
    Gate,
    MockRunner,
    hashed_logits,
)

LONG: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Answers as long as they are allowed to be."""


class FailOnce:
    """A device that breaks in the first call of a kind, or in one with a certain request."""

    def __init__(self, kind: str, asked: Any = None) -> None:
        self.kind, self.asked, self.failed = kind, asked, False

    def __call__(self, call: Call) -> None:
        wanted = self.asked is None or self.asked.request in call.requests.values()
        if call.kind == self.kind and wanted and not self.failed:
            self.failed = True
            raise RuntimeError("the device broke")


@pytest.fixture
def device_thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.stop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def threaded_engine(
    thread: DeviceThread, users: int, before: Callable[[Call], None], max_queue: int = 100
) -> tuple[Engine, MockRunner]:
    runner = MockRunner(users, before)
    return Engine(runner, users, max_queue, 100, thread), runner


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs `function` in a thread of its own -> what waits for its result or raises its error."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body, daemon=True)  # a test that fails can end
    thread.start()

    def join() -> Any:
        thread.join(PATIENCE)
        assert outcome, "the call did not return"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return join


# Answers


def test_an_answer_has_its_tokens_and_then_its_end() -> None:
    engine, _ = hand_engine(2)
    asked = Asked([1, 2, 3], max_tokens=5, **LONG)
    run(engine, asked)
    assert len(asked.token_ids) == 5
    assert asked.reason == "length"
    assert asked.end is not None
    assert asked.end.error is None
    times = [token.seconds for token in asked.tokens]
    assert times == sorted(times)
    assert 0 < asked.end.queued_seconds <= times[0]
    assert times[-1] <= asked.end.total_seconds


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 2.0},
        {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": tuple(range(25))},
        {"seed": 4, "logprobs": 2},
        {"seed": 5, "top_p": 0.7, "repetition_penalty": 1.5},
        {"seed": 6, "min_tokens": 9, "stop_token_ids": tuple(range(25))},
    ],
)
def test_an_answer_is_what_model_and_sampling_say(params: dict[str, Any]) -> None:
    wanted = SamplingParams(**params)
    sampler = RowSampler(wanted, [3, 9], (EOS,), VOCAB)
    stops = {EOS, *wanted.stop_token_ids}
    content = [4.0, 10.0]  # the mock writes every token as one more than it is
    expected: list[Choice] = []
    while len(expected) < 20 and not (expected and expected[-1].token_id in stops):
        choice = choose(hashed_logits(np.array(content))[None], [sampler])[0]
        assert choice is not None
        expected.append(choice)
        sampler.accept(choice.token_id)
        content.append(choice.token_id + 1.0)
    answered = [token.choice for token in alone([3, 9], max_tokens=20, **params).tokens]
    assert answered == expected
    assert len(answered) >= wanted.min_tokens


def test_an_end_token_ends_the_answer_and_belongs_to_it() -> None:
    whole = alone([7], max_tokens=40, **LONG)
    stop = whole.token_ids[3]
    stopped = alone([7], max_tokens=40, stop_token_ids=(stop,), **LONG)
    first = whole.token_ids.index(stop)
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert stopped.reason == "stop"


def test_without_max_tokens_an_answer_may_fill_the_sequence() -> None:
    asked = alone([5] * 90, **LONG)
    assert len(asked.token_ids) == 6
    assert asked.reason == "length"


def test_only_rows_that_are_sampled_bring_logits_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[list[int]] = []
    fetch = MockRunner.decode

    def decode(self: MockRunner, requests: Any) -> Any:
        results = fetch(self, requests)
        logits = results.logits

        def watched(rows: Sequence[int]) -> Any:
            wanted.append(list(rows))
            return logits(rows)

        monkeypatch.setattr(results, "logits", watched)
        return results

    monkeypatch.setattr(MockRunner, "decode", decode)
    engine, _ = hand_engine(3)
    greedy = [Asked([1], max_tokens=3, **LONG), Asked([2], max_tokens=3, **LONG)]
    sampled = Asked([3], max_tokens=3, seed=1, ignore_eos=True)
    run(engine, greedy[0], greedy[1])
    assert wanted == []
    run(engine, sampled)
    assert wanted == [[0], [0]]


def test_counters_count() -> None:
    engine, _ = hand_engine(2)
    run(engine, Asked([1, 2], max_tokens=3, **LONG), Asked([3], max_tokens=3, **LONG))
    counters = engine.counters
    assert (counters.prompt_tokens, counters.generated_tokens) == (3, 6)
    # Prompt; prompt and row; 2 rows; row: the first is one step ahead of the second.
    assert (counters.steps, counters.decode_steps, counters.decode_rows) == (5, 3, 4)
    assert counters.step_seconds > 0


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
    engine, _ = hand_engine(2, FailOnce("restore", first))
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


# Closing


def test_a_closed_engine_takes_nothing(device_thread: DeviceThread) -> None:
    engine, runner = threaded_engine(device_thread, 1, lambda call: None)
    asked = Asked([1], max_tokens=3, **LONG)
    engine.submit(asked.request)
    engine.close(drain=PATIENCE)
    engine.close(drain=0.0)
    assert asked.wait().reason == "length"
    assert runner.closed
    assert device_thread._steppers == []
    with pytest.raises(EngineClosedError, match="the engine is closed; it takes no new requests"):
        engine.submit(Asked([1]).request)
    with pytest.raises(EngineClosedError, match="the engine is closed; its size cannot change"):
        engine.resize(4, lambda *args: None)
    engine.cancel(asked.request)
    assert engine.numbers() == (0, 1, 0)


def test_close_lets_what_was_accepted_finish(device_thread: DeviceThread, gate: Gate) -> None:
    engine, runner = threaded_engine(device_thread, 1, gate)
    asked = [Asked([n], max_tokens=5, **LONG) for n in (1, 2, 3)]
    for one in asked:
        engine.submit(one.request)
    gate.wait()
    join = in_background(lambda: engine.close(drain=PATIENCE))
    gate.open()
    join()
    for one in asked:
        prompt = one.request.prompt_token_ids
        assert one.wait().token_ids == alone(prompt, max_tokens=5, **LONG).token_ids
    assert runner.closed


def test_close_without_patience_cancels_what_is_left(
    device_thread: DeviceThread, gate: Gate
) -> None:
    engine, runner = threaded_engine(device_thread, 1, gate, max_queue=1)
    running, waiting, late = Asked([1], **LONG), Asked([2], **LONG), Asked([3], **LONG)
    engine.submit(running.request)
    gate.wait()
    engine.submit(waiting.request)
    at_the_door = in_background(lambda: engine.submit(late.request, wait=True))
    closed = in_background(lambda: engine.close(drain=0.0))
    with pytest.raises(EngineClosedError):
        at_the_door()  # so closing has begun, while the device is still busy
    wait_until(lambda: running.request.cancelled and waiting.request.cancelled)
    gate.open()
    closed()
    assert running.wait().reason == "cancelled"
    assert waiting.wait().reason == "cancelled"
    assert len(running.tokens) == 1
    assert len(runner.calls) == 1


def test_close_after_the_process_began_to_end_returns_at_once() -> None:
    thread = DeviceThread()
    engine, runner = threaded_engine(thread, 1, lambda call: None)
    thread.stop()
    engine.submit(Asked([1]).request)
    engine.close(drain=PATIENCE)
    assert not runner.closed


# Resizing


def steps_of(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert engine.step()


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
    assert engine.numbers() == (0, 0, 4)
    finish(engine)
    requests = [one.request for one in asked]
    entered = runner.requests_of("prefill", "restore")
    assert entered == [*requests[:2], *requests]
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
        Call("restore", {0: first}),
        Call("restore", {1: second}),
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
    saved = runner.requests_of("save")
    assert saved == [asked[0].request, asked[1].request, asked[0].request]
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


def engine_with_work(before: Callable[[Call], None]) -> tuple[Engine, MockRunner, list[Asked]]:
    """Two slots, two that run, one that waits."""
    engine, runner = hand_engine(2, before)
    asked = [Asked([n], max_tokens=8, **LONG) for n in (1, 2, 3)]
    for one in asked:
        engine.submit(one.request)
    steps_of(engine, 4)
    return engine, runner, asked


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


# Several engines


def test_two_engines_take_turns_on_one_thread(device_thread: DeviceThread, gate: Gate) -> None:
    order: list[str] = []

    def first_waits(call: Call) -> None:
        gate(call)
        order.append("a")

    a, runner_a = threaded_engine(device_thread, 2, first_waits)
    b, runner_b = threaded_engine(device_thread, 2, lambda call: order.append("b"))
    asked_a, asked_b = Asked([1], max_tokens=20, **LONG), Asked([1], max_tokens=20, **LONG)
    a.submit(asked_a.request)
    gate.wait()  # the thread stands in a's first step, so b has all its work before the second
    b.submit(asked_b.request)
    gate.open()
    expected = alone([1], max_tokens=20, **LONG).token_ids
    assert asked_a.wait().token_ids == expected
    assert asked_b.wait().token_ids == expected
    assert order == ["a", "b"] * 20
    assert runner_a.threads == runner_b.threads
    assert len(runner_a.threads) == 1


def test_an_engine_that_breaks_leaves_the_others_alone(
    device_thread: DeviceThread, gate: Gate
) -> None:
    broken, _ = threaded_engine(device_thread, 2, gate)
    healthy, _ = threaded_engine(device_thread, 2, lambda call: None)
    asked_broken = [Asked([n], max_tokens=20, **LONG) for n in (1, 2, 3)]
    asked_healthy = [Asked([n], max_tokens=20, **LONG) for n in (1, 2, 3)]
    for one in asked_broken:
        broken.submit(one.request)
    gate.wait()
    for one in asked_healthy:
        healthy.submit(one.request)
    broken._scheduler.slots._busy.clear()
    broken.cancel(asked_broken[0].request)  # whose slot the books no longer know
    gate.open()
    for one in asked_broken:
        assert one.wait().reason == "error"
    for one in asked_healthy:
        prompt = one.request.prompt_token_ids
        assert one.wait().token_ids == alone(prompt, max_tokens=20, **LONG).token_ids
    broken.close(drain=PATIENCE)
    late = Asked([4], max_tokens=2, **LONG)
    healthy.submit(late.request)
    assert late.wait().reason == "length"


def test_closing_one_engine_leaves_the_others_alone(device_thread: DeviceThread) -> None:
    closing, _ = threaded_engine(device_thread, 1, lambda call: None)
    staying, _ = threaded_engine(device_thread, 1, lambda call: None)
    closing.close(drain=0.0)
    asked = Asked([1], max_tokens=3, **LONG)
    staying.submit(asked.request)
    assert asked.wait().reason == "length"


# What is told about it


def test_every_step_is_told() -> None:
    engine, _ = hand_engine(2)
    told: list[StepReport] = []
    engine.on_step = told.append
    run(engine, Asked([1], max_tokens=3, **LONG), Asked([2], max_tokens=2, **LONG))
    assert [(report.kind, report.rows) for report in told] == [
        ("prefill", 1),
        ("prefill", 1),
        ("decode", 1),
        ("decode", 2),
    ]
    assert all(report.seconds > 0 for report in told)


def test_slots_tell_what_is_in_them() -> None:
    engine, _ = hand_engine(3)
    first, nobody = Asked([1, 2], user="a", max_tokens=2, **LONG), Asked([3], user=AnonymousUser())
    engine.submit(first.request)
    engine.step()
    assert engine.slots() == [
        SlotReport("decode", "a", first.request.number, 2, 1),
        SlotReport("free"),
        SlotReport("free"),
    ]
    engine.submit(nobody.request)
    engine.step()  # the prompt of the one, the last token of the other
    assert engine.slots() == [
        SlotReport("idle", "a"),
        SlotReport("decode", None, nobody.request.number, 1, 1),
        SlotReport("free"),
    ]


def test_a_request_in_its_prefill_is_told_as_such(device_thread: DeviceThread, gate: Gate) -> None:
    engine, _ = threaded_engine(device_thread, 1, gate)
    asked = Asked([1, 2, 3], user="a", **LONG)
    engine.submit(asked.request)
    gate.wait()
    assert engine.slots() == [SlotReport("prefill", "a", asked.request.number, 3, 0)]


# A device that is gone


class FailTimes:
    """A device that breaks in the first `times` calls."""

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
