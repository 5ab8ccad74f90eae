"""What runs in the next step: each rule by itself, then all of them against a plain model."""

from __future__ import annotations

from typing import Optional

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import Decode, Prefill, Scheduler
from glm_multiuser.engine.slots import Slots
from tests.engine.driving import Asked


def new_request(user: object = None) -> Request:
    return Asked([1], user).request


def scheduler_with(slots: int, *users: object) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(Slots(slots))
    requests = [new_request(user) for user in users]
    scheduler.waiting.extend(requests)
    return scheduler, requests


def test_nothing_to_do() -> None:
    scheduler, _ = scheduler_with(2)
    assert scheduler.schedule() is None
    scheduler.check()


def test_prefills_and_decode_steps_alternate() -> None:
    scheduler, (a, b, c) = scheduler_with(3, "a", "b", "c")
    assert scheduler.schedule() == Prefill(0, a)
    assert scheduler.schedule() == Decode({0: a})
    assert scheduler.schedule() == Prefill(1, b)
    assert scheduler.schedule() == Decode({0: a, 1: b})
    assert scheduler.schedule() == Prefill(2, c)
    assert scheduler.schedule() == Decode({0: a, 1: b, 2: c})
    assert scheduler.schedule() == Decode({0: a, 1: b, 2: c})


def test_a_decode_step_is_passed_over_when_nobody_runs_any_more() -> None:
    scheduler, (_, b) = scheduler_with(2, "a", "b")
    scheduler.schedule()
    scheduler.finish(0)  # its only token came with its prompt
    assert scheduler.schedule() == Prefill(1, b)


def test_what_runs_is_a_copy() -> None:
    scheduler, (a,) = scheduler_with(2, "a")
    scheduler.schedule()
    step = scheduler.schedule()
    scheduler.finish(0)
    assert step == Decode({0: a})


def test_a_second_request_of_a_busy_user_lets_others_pass() -> None:
    scheduler, (first, second, other) = scheduler_with(3, "a", "a", "b")
    assert scheduler.schedule() == Prefill(0, first)
    scheduler.schedule()
    assert scheduler.schedule() == Prefill(1, other)
    assert scheduler.waiting == [second]
    scheduler.finish(0)
    scheduler.schedule()
    assert scheduler.schedule() == Prefill(0, second)


def test_nobody_else_is_overtaken() -> None:
    scheduler, (_, b, c) = scheduler_with(1, "a", "b", "c")
    scheduler.schedule()
    assert isinstance(scheduler.schedule(), Decode)
    assert scheduler.waiting == [b, c]
    scheduler.finish(0)
    assert scheduler.schedule() == Prefill(0, b)


def test_a_slot_that_failed_is_not_kept() -> None:
    scheduler, _ = scheduler_with(2, "a")
    scheduler.schedule()
    scheduler.finish(0, keep=False)
    assert scheduler.slots.slot_of("a") is None


def test_a_pause_puts_what_runs_in_front_oldest_first() -> None:
    scheduler, (a, b, c) = scheduler_with(2, "a", "b", "c")
    scheduler.schedule()
    scheduler.schedule()
    scheduler.schedule()
    scheduler.finish(0)
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.running == {0: c, 1: b}
    late = new_request("late")
    scheduler.waiting.append(late)
    assert scheduler.pause(Slots(4)) == [(1, b), (0, c)]
    assert scheduler.waiting == [b, c, late]
    assert (scheduler.running, scheduler.slots.busy, scheduler.slots.idle) == ({}, 0, 0)
    scheduler.check()
    assert a.queued_seconds > 0


@pytest.mark.parametrize("defect", ["slot without request", "request without slot", "swapped"])
def test_books_that_do_not_match_are_noticed(defect: str) -> None:
    scheduler, (a, b) = scheduler_with(2, "a", "b")
    scheduler.schedule()
    scheduler.schedule()
    scheduler.schedule()
    if defect == "slot without request":
        del scheduler.running[0]
    elif defect == "request without slot":
        scheduler.slots.release("a", keep=False)
    else:
        scheduler.running = {0: b, 1: a}
    with pytest.raises(RuntimeError, match="do not match the slots"):
        scheduler.check()


class Life(RuleBasedStateMachine):
    """Any order of events, beside a model of what has to come out.

    The model keeps who arrived, who holds which slot, and which slots are idle since when; it
    says what the next step must be.
    """

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.count = count
        self.scheduler = Scheduler(Slots(count))
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.idle: list[tuple[object, int]] = []
        """(user, slot), the least recently used first."""
        self.last: Optional[str] = None
        """What the last step was."""
        self.accepted: set[Request] = set()
        self.ended: set[Request] = set()

    @rule(user=st.one_of(st.none(), st.integers(0, 5)))
    def submit(self, user: Optional[int]) -> None:
        request = new_request(user)
        self.waiting.append(request)
        self.accepted.add(request)
        self.scheduler.waiting.append(request)

    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        expected = self.expected_step()
        assert step == expected
        if isinstance(expected, Prefill):
            self.idle = [entry for entry in self.idle if entry[1] != expected.slot]
            self.waiting.remove(expected.request)
            self.running[expected.slot] = expected.request
        self.last = type(step).__name__

    def expected_step(self) -> object:
        decode = Decode(self.running) if self.running else None
        if self.last == "Prefill" and decode:
            return decode
        busy_users = {request.user for request in self.running.values()}
        ready = [request for request in self.waiting if request.user not in busy_users]
        if ready and len(self.running) < self.count:
            return Prefill(self.expected_slot(ready[0].user), ready[0])
        return decode

    def expected_slot(self, user: object) -> int:
        own = [slot for owner, slot in self.idle if owner == user]
        idle = [slot for _, slot in self.idle]
        free = [s for s in range(self.count) if s not in self.running and s not in idle]
        return (own + free + idle)[0]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data: st.DataObject, keep: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running.pop(slot)
        self.ended.add(request)
        if keep:
            self.idle.append((request.user, slot))
        assert self.scheduler.finish(slot, keep) is request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.ended.add(request)
        self.scheduler.waiting.remove(request)

    @rule(count=st.integers(1, 5))
    def resize(self, count: int) -> None:
        paused = sorted(self.running.items(), key=lambda item: item[1].number)
        assert self.scheduler.pause(Slots(count)) == paused
        self.count = count
        self.waiting = [request for _, request in paused] + self.waiting
        self.running, self.idle = {}, []

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        here = [*self.scheduler.waiting, *self.scheduler.running.values()]
        assert len(here) == len(set(here))
        assert set(here) | self.ended == self.accepted
        assert not set(here) & self.ended

    @invariant()
    def order_and_places_are_those_of_the_model(self) -> None:
        assert self.scheduler.waiting == self.waiting
        assert self.scheduler.running == self.running

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        slots = self.scheduler.slots
        assert (slots.busy, slots.idle) == (len(self.running), len(self.idle))
        for owner, slot in self.idle:
            assert slots.slot_of(owner) == slot
        self.scheduler.check()

    @invariant()
    def no_user_runs_twice(self) -> None:
        users = [request.user for request in self.scheduler.running.values()]
        assert len(users) == len(set(users))

    def teardown(self) -> None:
        """Whatever happened before: everybody who waits gets a turn, and nobody starves."""
        if not hasattr(self, "scheduler"):
            return
        decoded: dict[Request, int] = dict.fromkeys(self.waiting, 0)
        decoded.update(dict.fromkeys(self.running.values(), 0))
        steps = 0
        while (step := self.scheduler.schedule()) is not None:
            steps += 1
            assert steps <= 6 * len(decoded) + 1, "somebody starves"
            if isinstance(step, Decode):
                for slot, request in step.requests.items():
                    decoded[request] += 1
                    if decoded[request] == 2:
                        self.scheduler.finish(slot)
        assert set(decoded.values()) <= {2}


Life.TestCase.settings = settings(
    derandomize=True, max_examples=60, stateful_step_count=40, deadline=None
)
TestLife = Life.TestCase
