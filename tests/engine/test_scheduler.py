"""The scheduler's rules, one by one; `test_scheduler_life.py` has them combined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Optional

import pytest

from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import ChunkSizes, Scheduler
from glm_multiuser.engine.slots import Slots
from glm_multiuser.engine.step import PromptChunk, Step
from tests.engine.scheduling import carry_out, cut, new_request, new_scheduler, slowly, whole


def scheduler_with(
    slots: int,
    *users: object,
    chunk_sizes: Optional[ChunkSizes] = None,
    lengths: Sequence[int] = (),
) -> tuple[Scheduler, list[Request]]:
    """A scheduler and its queue; by default one whole prompt per step."""
    scheduler = new_scheduler(slots, chunk_sizes or whole(1))
    requests = [
        new_request(user, length) for user, length in zip_longest(users, lengths, fillvalue=1)
    ]
    for request in requests:
        scheduler.waiting.append(request)
    return scheduler, requests


def next_step(scheduler: Scheduler) -> Step:
    """Schedules a step, carries it out, and returns it."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.check()
    carry_out(step)
    return step


def test_nothing_to_do() -> None:
    scheduler, _ = scheduler_with(2)
    assert scheduler.schedule() is None
    scheduler.check()


def test_whoever_decodes_takes_part_in_every_step() -> None:
    scheduler, (a, b, c) = scheduler_with(3, "a", "b", "c")
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 1)}, {0: a})
    assert next_step(scheduler) == Step({2: PromptChunk(c, 1)}, {0: a, 1: b})
    assert next_step(scheduler) == Step({}, {0: a, 1: b, 2: c})
    assert next_step(scheduler) == Step({}, {0: a, 1: b, 2: c})


def test_everybody_for_whom_there_is_a_slot_is_admitted_at_once() -> None:
    scheduler, (a, b, c, d) = scheduler_with(3, *"abcd")
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1)})
    assert scheduler.running == {0: a, 1: b, 2: c}
    assert list(scheduler.waiting) == [d]
    assert all(one.queued_seconds > 0 for one in (a, b, c))
    assert d.queued_seconds == 0


def test_a_step_goes_on_without_whoever_has_ended() -> None:
    scheduler, (_, b) = scheduler_with(2, "a", "b")
    next_step(scheduler)
    scheduler.finish(0)  # its only token came with its prompt
    assert next_step(scheduler) == Step({1: PromptChunk(b, 1)})


def test_whoever_ends_before_its_prompt_is_in_has_no_more_turns() -> None:
    scheduler, (_, b) = scheduler_with(2, "a", "b", chunk_sizes=cut(2), lengths=[9, 4])
    next_step(scheduler)
    scheduler.finish(0)
    scheduler.check()
    assert next_step(scheduler) == Step({1: PromptChunk(b, 2)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 2)})


def test_a_step_is_a_copy() -> None:
    scheduler, (a,) = scheduler_with(2, "a")
    next_step(scheduler)
    step = scheduler.schedule()
    scheduler.finish(0)
    assert step == Step({}, {0: a})


def test_a_second_request_of_a_busy_user_lets_others_pass() -> None:
    scheduler, (first, second, other) = scheduler_with(3, "a", "a", "b")
    assert next_step(scheduler) == Step({0: PromptChunk(first, 1)})
    assert next_step(scheduler) == Step({1: PromptChunk(other, 1)}, {0: first})
    assert list(scheduler.waiting) == [second]
    scheduler.finish(0)
    assert next_step(scheduler) == Step({0: PromptChunk(second, 1)}, {1: other})


def test_nobody_else_is_overtaken() -> None:
    scheduler, (a, b, c) = scheduler_with(1, "a", "b", "c")
    next_step(scheduler)
    assert next_step(scheduler) == Step({}, {0: a})
    assert list(scheduler.waiting) == [b, c]
    scheduler.finish(0)
    assert next_step(scheduler) == Step({0: PromptChunk(b, 1)})


# How prompts enter


def test_as_many_prompts_enter_together_as_are_taken() -> None:
    scheduler, (a, b, c, d) = scheduler_with(9, *"abcd", chunk_sizes=whole(3))
    assert next_step(scheduler) == Step(
        {0: PromptChunk(a, 1), 1: PromptChunk(b, 1), 2: PromptChunk(c, 1)}
    )
    assert next_step(scheduler) == Step({3: PromptChunk(d, 1)}, {0: a, 1: b, 2: c})


def test_only_as_many_enter_as_there_are_slots() -> None:
    scheduler, (a, b, c) = scheduler_with(2, *"abc", chunk_sizes=whole(4))
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1), 1: PromptChunk(b, 1)})
    assert list(scheduler.waiting) == [c]


def test_a_prompt_that_was_not_taken_is_not_overtaken() -> None:
    scheduler, (a, b, c) = scheduler_with(9, *"abc", chunk_sizes=whole(4), lengths=[1, 2, 1])
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 2)}, {0: a})
    assert next_step(scheduler) == Step({2: PromptChunk(c, 1)}, {0: a, 1: b})


def test_two_prompts_of_one_user_never_enter_together() -> None:
    scheduler, (a, _, b) = scheduler_with(9, "a", "a", "b", chunk_sizes=whole(4))
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1), 1: PromptChunk(b, 1)})


def test_prompts_that_are_cut_take_turns() -> None:
    scheduler, (a, b, c) = scheduler_with(3, *"abc", chunk_sizes=cut(4), lengths=[9, 7, 2])
    assert next_step(scheduler) == Step({0: PromptChunk(a, 4)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 4)})
    # The short one did not wait for the long ones, and the last that is taken may be cut.
    assert next_step(scheduler) == Step({2: PromptChunk(c, 2), 0: PromptChunk(a, 2)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 3), 0: PromptChunk(a, 1)}, {2: c})
    assert next_step(scheduler) == Step({0: PromptChunk(a, 2)}, {1: b, 2: c})
    assert next_step(scheduler) == Step({}, {0: a, 1: b, 2: c})


def test_a_prompt_on_its_way_keeps_its_turn_until_it_is_in() -> None:
    scheduler, (a, b) = scheduler_with(2, *"ab", chunk_sizes=slowly(3), lengths=[5, 2])
    assert next_step(scheduler) == Step({0: PromptChunk(a, 0)})
    assert next_step(scheduler) == Step({0: PromptChunk(a, 0)})
    step = next_step(scheduler)
    assert step == Step({0: PromptChunk(a, 5)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 0)}, {0: a})


def test_who_is_on_its_way_has_no_next_token() -> None:
    a, b = (new_request(user, 3) for user in "ab")
    step = Step({0: PromptChunk(a, 0)}, {1: b})
    assert step.requests == {0: a, 1: b}
    assert step.answered == {1: b}


def test_whoever_comes_later_has_its_turn_later() -> None:
    scheduler, (a,) = scheduler_with(2, "a", chunk_sizes=cut(2), lengths=[6])
    assert next_step(scheduler) == Step({0: PromptChunk(a, 2)})
    late = new_request("late")
    scheduler.waiting.append(late)
    assert next_step(scheduler) == Step({0: PromptChunk(a, 2)})
    assert next_step(scheduler) == Step({1: PromptChunk(late, 1), 0: PromptChunk(a, 1)})


# What a step says about itself


def test_whoever_has_a_next_token_is_answered() -> None:
    a, b, c, d = (new_request(user, 3) for user in "abcd")
    c.computed_tokens = 1
    step = Step({2: PromptChunk(a, 2), 3: PromptChunk(b, 3), 1: PromptChunk(c, 2)}, {0: d})
    assert list(step.requests.items()) == [(2, a), (3, b), (1, c), (0, d)]
    assert list(step.answered.items()) == [(0, d), (3, b), (1, c)]


def test_a_step_in_two_parts() -> None:
    a, b, c = (new_request(user) for user in "abc")
    pieces = {0: PromptChunk(a, 1)}
    assert Step(pieces, {1: b}, {2: c}).parts() == [Step(pieces), Step({}, {1: b})]
    assert Step(pieces, {}, {2: c}).parts() == [Step(pieces)]
    assert Step({}, {1: b}, {2: c}).parts() == [Step({}, {1: b})]
    assert Step({}, {}, {2: c}).parts() == []


# Pauses


def test_what_was_saved_goes_back_and_takes_part_from_the_next_step_on() -> None:
    scheduler, (a, b, c) = scheduler_with(9, *"abc", chunk_sizes=whole(4))
    b.saved_past, b.computed_tokens = (), 1
    # Requests behind it in the queue do not wait for it.
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1), 2: PromptChunk(c, 1)}, {}, {1: b})
    assert next_step(scheduler) == Step({}, {0: a, 1: b, 2: c})


def test_a_prompt_that_was_saved_before_it_was_in_enters_from_the_next_step_on() -> None:
    scheduler, (a, b) = scheduler_with(2, *"ab", chunk_sizes=cut(3), lengths=[5, 5])
    a.saved_past, a.computed_tokens = (), 2
    assert next_step(scheduler) == Step({1: PromptChunk(b, 3)}, {}, {0: a})
    # The turn that it had to leave out is its next.
    assert next_step(scheduler) == Step({0: PromptChunk(a, 3)})
    assert next_step(scheduler) == Step({1: PromptChunk(b, 2)}, {0: a})


def test_a_step_in_which_somebody_only_returns_is_one() -> None:
    scheduler, (a,) = scheduler_with(1, "a")
    a.saved_past, a.computed_tokens = (), 1
    assert next_step(scheduler) == Step({}, {}, {0: a})
    assert next_step(scheduler) == Step({}, {0: a})


def test_a_pause_puts_what_runs_in_front_oldest_first() -> None:
    scheduler, (a, b, c) = scheduler_with(2, "a", "b", "c")
    next_step(scheduler)
    next_step(scheduler)
    scheduler.finish(0)
    next_step(scheduler)
    assert scheduler.running == {0: c, 1: b}
    late = new_request("late")
    scheduler.waiting.append(late)
    scheduler.pause(Slots(4))
    assert list(scheduler.waiting) == [b, c, late]
    assert (scheduler.running, scheduler.slots.busy, scheduler.slots.idle) == ({}, 0, 0)
    scheduler.check()
    assert a.queued_seconds > 0


def test_a_pause_forgets_whose_turn_it_was() -> None:
    scheduler, (a, b) = scheduler_with(2, *"ab", chunk_sizes=cut(1), lengths=[3, 3])
    next_step(scheduler)  # so the next turn is b's
    scheduler.pause(Slots(3))
    scheduler.check()
    a.saved_past = b.saved_past = ()
    assert next_step(scheduler) == Step({}, {}, {0: a, 1: b})
    assert next_step(scheduler) == Step({0: PromptChunk(a, 1)})


# The books


def test_a_slot_that_failed_is_not_kept() -> None:
    scheduler, _ = scheduler_with(2, "a")
    next_step(scheduler)
    scheduler.finish(0, failed=True)
    assert scheduler.slots.slot_of("a") is None


@pytest.mark.parametrize("defect", ["slot without request", "request without slot", "swapped"])
def test_books_that_do_not_match_are_noticed(defect: str) -> None:
    scheduler, (a, b) = scheduler_with(2, "a", "b", chunk_sizes=whole(2))
    next_step(scheduler)
    if defect == "slot without request":
        del scheduler.running[0]
    elif defect == "request without slot":
        scheduler.slots.release("a", keep=False)
    else:
        scheduler.running = {0: b, 1: a}
    with pytest.raises(RuntimeError, match="do not match the slots"):
        scheduler.check()


def test_a_turn_of_a_slot_where_nobody_runs_is_noticed() -> None:
    scheduler, _ = scheduler_with(2, "a", chunk_sizes=cut(1), lengths=[3])
    next_step(scheduler)
    del scheduler.running[0]
    with pytest.raises(RuntimeError, match=r"slots \[0\] are in prefill"):
        scheduler.check()
