"""The engine with a numpy model: how requests end, without affecting other requests.

Most tests step the engine by hand. Those about threads hold its runner at a gate, so nothing here
depends on time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.engine import SlotReport
from glm_multiuser.engine.request import AnonymousUser
from glm_multiuser.engine.step_loop import StepReport
from glm_multiuser.errors import EngineClosedError
from glm_multiuser.sampling import Choice, RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams
from tests.engine.driving import (
    LONG,
    PATIENCE,
    Asked,
    alone,
    hand_engine,
    in_background,
    run,
    threaded_engine,
    wait_until,
)
from tests.engine.mock_runner import EOS, VOCAB, Call, Gate, MockRunner, hashed_logits

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


# Closing


def test_a_closed_engine_takes_nothing(device_thread: DeviceThread) -> None:
    engine, runner = threaded_engine(device_thread, 1, lambda call: None)
    asked = Asked([1], max_tokens=3, **LONG)
    engine.submit(asked.request)
    engine.close(drain=PATIENCE)
    engine.close(drain=0.0)
    assert asked.wait().reason == "length"
    assert runner.closed
    assert device_thread._steppers == ()
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


def test_a_cancel_may_interrupt_another() -> None:
    request = Asked([1]).request

    def interrupt(frame: Any, event: str, argument: Any) -> Any:
        """As a signal handler, or a finalizer, does between any two lines."""
        sys.settrace(None)
        request.cancel()
        sys.settrace(interrupt)
        return interrupt

    def cancel() -> None:
        sys.settrace(interrupt)
        request.cancel()
        sys.settrace(None)

    in_background(cancel)()
    assert request.cancelled


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

    def end() -> None:
        engine.submit(Asked([1], **LONG).request)
        thread.stop()

    thread.call(end)
    engine.close(drain=PATIENCE)
    assert not runner.closed


@pytest.mark.parametrize("wait", [False, True])
def test_no_request_is_accepted_after_the_process_began_to_end(wait: bool) -> None:
    thread = DeviceThread()
    engine, _ = threaded_engine(thread, 1, lambda call: None, max_queue=0)
    thread.stop()
    with pytest.raises(EngineClosedError, match="this process is about to"):
        engine.submit(Asked([1]).request, wait)
    with pytest.raises(EngineClosedError, match="this process is about to"):
        engine.check_queue("")


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


# What it reports


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
