"""Groups share queue and slots: none starves, and a single group may use everything."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.engine.engine import Engine
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import Scheduler
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.waiting import has_room
from glm_multiuser.errors import QueueFullError
from tests.engine.driving import Asked, alone, finish, hand_engine
from tests.engine.mock_runner import FAILS_LATER
from tests.engine.scheduling import carry_out, new_request, new_scheduler, whole

LONG: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
GROUPS = "abcd"


def admitted(scheduler: Scheduler) -> list[Request]:
    """Runs a step; returns the requests that got a slot, in order."""
    before = list(scheduler.running.values())
    step = scheduler.schedule()
    if step is not None:
        carry_out(step)
    return [request for request in scheduler.running.values() if request not in before]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    rounds=st.lists(
        st.tuples(st.lists(st.sampled_from(GROUPS), max_size=6), st.sets(st.integers(0, 3))),
        max_size=30,
    ),
)
def test_no_group_starves(slots: int, rounds: list[tuple[list[str], set[int]]]) -> None:
    """A waiting request is overtaken at most once by each other group."""
    scheduler = new_scheduler(slots, whole(9))
    arrived: dict[str, list[Request]] = {group: [] for group in GROUPS}
    overtaken: Counter[tuple[str, str]] = Counter()
    for submitted, ended in rounds:
        for slot in ended & scheduler.running.keys():
            scheduler.finish(slot, failed=True)
        for group in submitted:
            arrived[group].append(new_request(group=group))
            scheduler.waiting.append(arrived[group][-1])
        waiting = Counter(request.group for request in scheduler.waiting)
        running = Counter(request.group for request in scheduler.running.values())
        entered = admitted(scheduler)
        for request in entered:
            assert request is arrived[request.group].pop(0), "first come, first served"
            waiting[request.group] -= 1
            running[request.group] += 1
            for group in GROUPS:
                overtaken[request.group, group] = 0
                hungry = waiting[group] > 0 and not running[group]
                overtaken[group, request.group] = hungry * (overtaken[group, request.group] + 1)
                assert overtaken[group, request.group] <= 1
        assert len(scheduler.running) == slots or not sum(waiting.values()), "a slot is not used"


def test_a_group_alone_has_every_slot_and_the_whole_queue() -> None:
    engine, _ = hand_engine(3, max_queue=5)
    asked = [Asked([n], group="a", max_tokens=4, **LONG) for n in range(9)]
    for one in asked[:8]:
        engine.submit(one.request)
    engine.step()
    assert engine.numbers() == (3, 0, 5)
    with pytest.raises(QueueFullError, match="5 requests are waiting; max_queue is 5"):
        engine.submit(asked[8].request)
    finish(engine)
    assert [one.wait().reason for one in asked[:8]] == ["length"] * 8


def test_a_full_queue_has_room_for_the_share_of_another_group_and_loses_nobody() -> None:
    engine, _ = hand_engine(2, max_queue=6)
    flood = [Asked([n], group="a", max_tokens=3, **LONG) for n in range(8)]
    for one in flood:
        engine.submit(one.request)
    with pytest.raises(QueueFullError):
        engine.submit(Asked([9], group="a").request)
    others = [Asked([n], group=group, max_tokens=3, **LONG) for group in "bc" for n in range(3)]
    refused = []
    for one in others:
        try:
            engine.submit(one.request)
        except QueueFullError:
            refused.append(one)
    # Of six places, three for each of two groups, then two for each of three.
    assert refused == others[5:]
    finish(engine)
    for one in [*flood, *others[:5]]:
        expected = alone(one.request.prompt_token_ids, max_tokens=3, **LONG)
        assert one.wait().token_ids == expected.token_ids


@pytest.mark.parametrize("users", [1, 2, 8])
def test_beside_a_flood_the_first_token_comes_two_answers_later_at_most(users: int) -> None:
    engine, _ = hand_engine(users, max_queue=64)
    flood: list[Asked] = []
    keep_full(engine, flood)
    for _ in range(users):
        engine.step()  # a prompt enters in each
    for number in range(4):
        ended = answers(flood)
        late = Asked([number], group="b", max_tokens=2, **LONG)
        engine.submit(late.request)
        while not late.look().tokens:
            keep_full(engine, flood)
            engine.step()
        assert answers(flood) - ended <= 2
        while late.look().end is None:
            engine.step()
    for one in flood:
        engine.cancel(one.request)
    finish(engine)


def keep_full(engine: Engine, flood: list[Asked]) -> None:
    """Submits for group a until the engine accepts no more; answers are not equally long."""
    while True:
        one = Asked([len(flood) % FAILS_LATER], group="a", max_tokens=20 + len(flood) % 7, **LONG)
        try:
            engine.submit(one.request)
        except QueueFullError:
            return
        flood.append(one)


def answers(asked: list[Asked]) -> int:
    """Of these, those that have ended."""
    return sum(one.look().end is not None for one in asked)


def test_a_group_that_had_the_slots_lends_them_one_by_one() -> None:
    scheduler = new_scheduler(4, whole(9))
    for group in "aaaaaaaabbbb":
        scheduler.waiting.append(new_request(group=group))
    assert "".join(one.group for one in admitted(scheduler)) == "abab"
    for slot in range(4):
        scheduler.finish(slot, failed=True)
    assert "".join(one.group for one in admitted(scheduler)) == "abab"
    for slot in range(4):
        scheduler.finish(slot, failed=True)
    assert "".join(one.group for one in admitted(scheduler)) == "aaaa"


def test_a_group_whose_users_are_busy_lets_others_pass_and_keeps_its_turn() -> None:
    scheduler = new_scheduler(2, whole(9))
    requests = [
        new_request(user, group=group) for user, group in [(1, "a"), (1, "a"), (2, "b"), (3, "b")]
    ]
    for request in requests:
        scheduler.waiting.append(request)
    assert admitted(scheduler) == [requests[0], requests[2]]
    scheduler.finish(1)
    assert admitted(scheduler) == [requests[3]]
    scheduler.finish(0)
    assert admitted(scheduler) == [requests[1]]


def test_what_a_resize_paused_goes_on_before_other_groups() -> None:
    scheduler = new_scheduler(3, whole(9))
    running = [new_request(group="a") for _ in range(3)]
    for request in running:
        scheduler.waiting.append(request)
    admitted(scheduler)
    for request in running:
        request.saved_past = ()
    scheduler.waiting.append(new_request(group="b"))
    scheduler.pause(Slots(2))
    assert admitted(scheduler) == running[:2]
    scheduler.finish(0)
    assert admitted(scheduler) == running[2:]


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    limit=st.integers(0, 40), wanted=st.lists(st.sampled_from(GROUPS), max_size=200), data=st.data()
)
def test_everybody_gets_a_share_and_together_they_stay_within_bounds(
    limit: int, wanted: list[str], data: st.DataObject
) -> None:
    counts: Counter[str] = Counter()
    for group in wanted:
        if has_room(counts, group, limit):
            counts[group] += 1
        else:
            assert counts[group] >= limit / len({*counts, group})
            if counts[group] and data.draw(st.booleans()):
                counts[group] -= 1
        counts = +counts
        harmonic = sum(1 / number for number in range(1, len(GROUPS) + 1))
        assert sum(counts.values()) <= limit * harmonic + len(GROUPS)
    if len({*wanted}) == 1:
        assert sum(counts.values()) <= limit
