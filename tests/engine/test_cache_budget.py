"""Cache memory budget: admission, eviction, and that it is never exceeded."""

from __future__ import annotations

import random
from typing import Optional

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_multiuser.engine.engine import Engine
from glm_multiuser.engine.request import AnonymousUser, Request
from glm_multiuser.engine.slots import Slots
from tests.engine.driving import Asked, alone, finish, hand_engine, run
from tests.engine.mock_runner import BYTES_PER_TOKEN, SEQ_LENGTH, MockRunner

PAGE = 4


def in_pages(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


class Budget(RuleBasedStateMachine):
    """Any order of events, beside what each user may come to, or holds."""

    @initialize(count=st.integers(1, 4), limit=st.integers(4, 40))
    def begin(self, count: int, limit: int) -> None:
        self.slots = Slots(count, in_pages, limit)
        self.count, self.limit = count, limit
        self.running: dict[int, int] = {}
        """User -> the most tokens of its request."""
        self.idle: dict[int, int] = {}
        """User -> the tokens that it holds; the least recently used first."""

    @rule(user=st.integers(0, 5), tokens=st.integers(1, 40))
    def acquire(self, user: int, tokens: int) -> None:
        if user in self.running:
            return
        promised = sum(map(in_pages, self.running.values())) + in_pages(tokens)
        before = {one: self.slots.slot_of(one) for one in self.idle}
        slot = self.slots.acquire(user, tokens)
        if len(self.running) == self.count or promised > self.limit:
            assert slot is None
            assert self.slots.take_emptied() == []
            return
        own = before.pop(user, slot)
        assert slot == own, "a user comes back to its own slot"
        self.running[user] = tokens
        self.idle.pop(user, None)
        evicted = []
        while promised + sum(map(in_pages, self.idle.values())) > self.limit or (
            len(self.running) + len(self.idle) > self.count
        ):
            oldest = next(iter(self.idle))
            if self.idle.pop(oldest):
                evicted.append(before[oldest])
        assert self.slots.take_emptied() == evicted, "no more than is needed, in the order of use"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        user = data.draw(st.sampled_from(sorted(self.running)))
        held = data.draw(st.integers(0, self.running.pop(user)))
        self.slots.release(user, keep, [0] * held)
        if keep:
            self.idle[user] = held

    @invariant()
    def the_budget_holds(self) -> None:
        self.slots.check()
        held = sum(map(in_pages, self.idle.values()))
        assert self.slots.taken_bytes == sum(map(in_pages, self.running.values())) + held
        assert self.slots.taken_bytes <= self.limit
        assert self.slots.idle_tokens() == list(self.idle.values())


Budget.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBudget = Budget.TestCase


def budget_engine(users: int, tokens: int, chunk: Optional[int] = 4) -> Engine:
    return hand_engine(users, chunk=chunk, cache_limit=tokens * BYTES_PER_TOKEN)[0]


def long(prompt: int, new: int, user: Optional[int] = None, group: str = "") -> Asked:
    """A request that comes to just so many tokens."""
    return Asked([1 + prompt % 40] * prompt, user, group=group, max_tokens=new, ignore_eos=True)


def entered(engine: Engine) -> list[Request]:
    """Every request, in the order of admission."""
    assert isinstance(engine.runner, MockRunner)
    return list(dict.fromkeys(engine.runner.requests_of("prefill")))


def running(engine: Engine) -> set[object]:
    return {request.user for request in engine._scheduler.running.values()}


def test_a_request_waits_until_all_that_it_may_need_is_there() -> None:
    engine = budget_engine(4, tokens=30)
    asked = [long(5, 10, user) for user in range(3)]
    for one in asked:
        engine.submit(one.request)
    engine.step()
    assert running(engine) == {0, 1}
    assert engine.numbers() == (2, 0, 1)
    finish(engine)
    assert [one.wait().reason for one in asked] == ["length"] * 3


def test_a_large_request_is_overtaken_by_so_many_as_there_are_slots() -> None:
    engine = budget_engine(2, tokens=40)
    small = [long(3, 7, user) for user in range(9)]
    engine.submit(small[0].request)
    engine.step()
    large = long(20, 20, 100)
    for one in [large, *small[1:]]:
        engine.submit(one.request)
    finish(engine)
    assert entered(engine).index(large.request) == 3
    assert large.request.overtaken == 2


def test_a_large_request_is_not_overtaken_by_one_that_waits_for_an_eviction() -> None:
    engine = budget_engine(2, tokens=100, chunk=8)
    run(engine, long(20, 10, 1))  # idle, it holds 29
    engine.submit(long(3, 47, 2).request)
    engine.step()
    ready: list[object] = []
    engine._scheduler.slots.may_evict = ready.__contains__
    large, small = long(50, 40, 3), long(2, 28, 4)
    for one in (large, small):
        engine.submit(one.request)
    for _ in range(3):
        engine.step()
    assert running(engine) == {2}
    assert large.request.overtaken == 0
    ready.append(1)
    engine.step()
    assert running(engine) == {2, 4}
    assert large.request.overtaken == 1


def test_a_later_request_of_the_same_user_passes_no_earlier_one() -> None:
    engine = budget_engine(3, tokens=40)
    first, large, later = long(3, 27, 1), long(20, 20, 2), long(3, 2, 2)
    for one in (first, large, later):
        engine.submit(one.request)
    engine.step()
    assert running(engine) == {1}
    finish(engine)
    assert entered(engine) == [first.request, large.request, later.request]


def test_a_large_request_of_one_group_passes_no_turn_of_another() -> None:
    engine = budget_engine(3, tokens=40)
    asked = [long(3, 27, 1, "a"), long(20, 20, 2, "a"), long(3, 2, 3, "b"), long(3, 2, 4, "b")]
    for one in asked:
        engine.submit(one.request)
    engine.step()
    assert running(engine) == {1, 3, 4}
    finish(engine)
    assert {one.wait().reason for one in asked} == {"length"}


def test_idle_users_are_evicted_for_memory_the_least_recently_used_first() -> None:
    engine = budget_engine(5, tokens=40)
    for user in (1, 2, 3):
        run(engine, long(6, 5, user))
    assert engine.numbers() == (0, 3, 0)
    assert engine.resident_bytes() == 3 * 10 * BYTES_PER_TOKEN
    run(engine, long(10, 5, 4))
    assert {slot.user for slot in engine.slots()} == {None, 2, 3, 4}
    again = long(6, 5, 2)
    run(engine, again)
    assert again.request.cached_tokens == 5


def test_a_shorter_turn_gives_memory_back() -> None:
    engine = budget_engine(2, tokens=60)
    run(engine, long(30, 10, 1))
    assert engine.resident_bytes() == 39 * BYTES_PER_TOKEN
    turn = Asked([31] * 10 + [2] * 3, 1, max_tokens=2, ignore_eos=True)
    run(engine, turn)
    assert turn.request.cached_tokens == 10
    assert engine.resident_bytes() == 14 * BYTES_PER_TOKEN


@pytest.mark.parametrize("chunk", [None, 3])
def test_nothing_is_kept_where_nothing_can_be_used_again(chunk: Optional[int]) -> None:
    engine = budget_engine(2, tokens=60, chunk=chunk)
    run(engine, Asked([1] * 6, 1 if chunk is None else AnonymousUser(), max_tokens=5))
    assert engine.resident_bytes() == 0


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_hundred_requests_exhaust_the_budget_and_each_gets_its_answer(
    chunk: Optional[int],
) -> None:
    limit = SEQ_LENGTH * BYTES_PER_TOKEN
    chosen = random.Random(5)

    def within(call: object) -> None:
        slots = engine._scheduler.slots
        assert slots.taken_bytes <= limit
        assert engine.resident_bytes() <= slots.taken_bytes

    engine, _ = hand_engine(6, within, chunk=chunk, cache_limit=limit)
    asked = []
    for number in range(100):
        length = chosen.choice([2, 3, 5, 8, 60])
        prompt = [chosen.randrange(1, 40) for _ in range(length)]
        new = chosen.choice([2, 5, 9, SEQ_LENGTH - length])
        user, group = chosen.choice([None, *range(20)]), chosen.choice("ab")
        asked.append(Asked(prompt, user, group=group, max_tokens=new, temperature=0.0))
        engine.submit(asked[-1].request)
        if number % 3 == 0:
            engine.step()
        if number in (40, 70):
            engine.resize(3 if number == 40 else 8, lambda *what: None)
    finish(engine)
    for one in asked:
        most = one.request.params.max_tokens
        expected = alone(one.request.prompt_token_ids, max_tokens=most, temperature=0.0)
        assert one.wait().token_ids == expected.token_ids
        assert one.request.overtaken <= 8


def test_the_longest_request_is_what_the_budget_holds() -> None:
    engine = budget_engine(2, tokens=30)
    assert engine.longest(SEQ_LENGTH) == 30
    assert engine.longest(20) == 20
    assert hand_engine(2)[0].longest(SEQ_LENGTH) == SEQ_LENGTH
