"""What runs in the next step: each rule by itself, then all of them against a plain model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Callable, Optional

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import Decode, Prefill, PromptGroup, Scheduler
from glm_multiuser.engine.slots import Slots
from tests.engine.driving import Asked


def new_request(user: object = None, length: int = 1) -> Request:
    return Asked([1] * length, user).request


def group_by_length(most: int) -> Callable[[Request], PromptGroup]:
    return lambda request: (len(request.prompt_token_ids), most)


def scheduler_with(
    slots: int, *users: object, most: int = 1, lengths: Sequence[int] = ()
) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(Slots(slots), group_by_length(most))
    requests = [
        new_request(user, length) for user, length in zip_longest(users, lengths, fillvalue=1)
    ]
    scheduler.waiting.extend(requests)
    return scheduler, requests


def test_nothing_to_do() -> None:
    scheduler, _ = scheduler_with(2)
    assert scheduler.schedule() is None
    scheduler.check()


def test_prefills_and_decode_steps_alternate() -> None:
    scheduler, (a, b, c) = scheduler_with(3, "a", "b", "c")
    assert scheduler.schedule() == Prefill({0: a})
    assert scheduler.schedule() == Decode({0: a})
    assert scheduler.schedule() == Prefill({1: b})
    assert scheduler.schedule() == Decode({0: a, 1: b})
    assert scheduler.schedule() == Prefill({2: c})
    assert scheduler.schedule() == Decode({0: a, 1: b, 2: c})
    assert scheduler.schedule() == Decode({0: a, 1: b, 2: c})


def test_a_decode_step_is_passed_over_when_nobody_runs_any_more() -> None:
    scheduler, (_, b) = scheduler_with(2, "a", "b")
    scheduler.schedule()
    scheduler.finish(0)  # its only token came with its prompt
    assert scheduler.schedule() == Prefill({1: b})


def test_what_runs_is_a_copy() -> None:
    scheduler, (a,) = scheduler_with(2, "a")
    scheduler.schedule()
    step = scheduler.schedule()
    scheduler.finish(0)
    assert step == Decode({0: a})


def test_a_second_request_of_a_busy_user_lets_others_pass() -> None:
    scheduler, (first, second, other) = scheduler_with(3, "a", "a", "b")
    assert scheduler.schedule() == Prefill({0: first})
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({1: other})
    assert scheduler.waiting == [second]
    scheduler.finish(0)
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({0: second})


def test_nobody_else_is_overtaken() -> None:
    scheduler, (_, b, c) = scheduler_with(1, "a", "b", "c")
    scheduler.schedule()
    assert isinstance(scheduler.schedule(), Decode)
    assert scheduler.waiting == [b, c]
    scheduler.finish(0)
    assert scheduler.schedule() == Prefill({0: b})


def test_prompts_of_one_kind_enter_together() -> None:
    scheduler, (a, b, c, d) = scheduler_with(9, *"abcd", most=3, lengths=[1, 1, 1, 1])
    assert scheduler.schedule() == Prefill({0: a, 1: b, 2: c})
    assert scheduler.schedule() == Decode({0: a, 1: b, 2: c})
    assert scheduler.schedule() == Prefill({3: d})


def test_only_as_many_enter_as_there_are_slots() -> None:
    scheduler, (a, b, c) = scheduler_with(2, *"abc", most=4, lengths=[1, 1, 1])
    assert scheduler.schedule() == Prefill({0: a, 1: b})
    assert scheduler.waiting == [c]


def test_a_prompt_of_another_kind_is_not_overtaken() -> None:
    scheduler, (a, b, c) = scheduler_with(9, *"abc", most=4, lengths=[1, 2, 1])
    assert scheduler.schedule() == Prefill({0: a})
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({1: b})
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({2: c})


def test_two_prompts_of_one_user_never_enter_together() -> None:
    scheduler, (a, _, b) = scheduler_with(9, "a", "a", "b", most=4, lengths=[1, 1, 1])
    assert scheduler.schedule() == Prefill({0: a, 1: b})


def test_what_was_saved_enters_alone() -> None:
    scheduler, (a, b, c) = scheduler_with(9, *"abc", most=4, lengths=[1, 1, 1])
    b.saved_past, b.computed_tokens = object(), 1
    assert scheduler.schedule() == Prefill({0: a})
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({1: b})
    scheduler.schedule()
    assert scheduler.schedule() == Prefill({2: c})


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

    @initialize(count=st.integers(1, 4), most=st.integers(1, 3))
    def begin(self, count: int, most: int) -> None:
        self.count = count
        self.most = most
        self.scheduler = Scheduler(Slots(count), group_by_length(most))
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.idle: list[tuple[object, int]] = []
        """(user, slot), the least recently used first."""
        self.last: Optional[str] = None
        """What the last step was."""
        self.accepted: set[Request] = set()
        self.ended: set[Request] = set()

    @rule(user=st.one_of(st.none(), st.integers(0, 5)), length=st.integers(1, 2))
    def submit(self, user: Optional[int], length: int) -> None:
        request = new_request(user, length)
        self.waiting.append(request)
        self.accepted.add(request)
        self.scheduler.waiting.append(request)

    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        expected = self.expected_step()
        assert step == expected
        if isinstance(expected, Prefill):
            for slot, request in expected.requests.items():
                self.idle = [entry for entry in self.idle if entry[1] != slot]
                self.waiting.remove(request)
                self.running[slot] = request
        self.last = type(step).__name__

    def expected_step(self) -> object:
        decode = Decode(self.running) if self.running else None
        if self.last == "Prefill" and decode:
            return decode
        busy_users = {request.user for request in self.running.values()}
        entering: dict[int, Request] = {}
        for request in self.waiting:
            if request.user in busy_users:
                continue
            first = next(iter(entering.values()), request)
            alike = len(request.prompt_token_ids) == len(first.prompt_token_ids)
            room = len(self.running) + len(entering) < self.count
            if not (alike and room and len(entering) < self.most):
                break
            entering[self.expected_slot(request.user, entering)] = request
            busy_users.add(request.user)
        return Prefill(entering) if entering else decode

    def expected_slot(self, user: object, taken: Collection[int]) -> int:
        own = [slot for owner, slot in self.idle if owner == user and slot not in taken]
        idle = [slot for _, slot in self.idle if slot not in taken]
        busy = {*self.running, *taken, *idle}
        return (own + [slot for slot in range(self.count) if slot not in busy] + idle)[0]

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
