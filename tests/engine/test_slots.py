"""Users and slots: every rule, one by one."""

from __future__ import annotations

import pytest

from glm_multiuser.engine.slots import Slots


def test_new_users_get_the_lowest_free_slots() -> None:
    slots = Slots(3)
    assert [slots.acquire(user) for user in "abc"] == [0, 1, 2]
    assert (slots.busy, slots.idle) == (3, 0)


def test_an_idle_slot_is_kept_for_its_user() -> None:
    slots = Slots(3)
    for user in "abc":
        slots.acquire(user)
    slots.release("b")
    assert slots.slot_of("b") == 1
    assert not slots.is_busy("b")
    assert (slots.busy, slots.idle) == (2, 1)
    assert slots.acquire("b") == 1
    assert slots.is_busy("b")


def test_a_free_slot_is_taken_before_an_idle_one() -> None:
    slots = Slots(3)
    slots.acquire("a")
    slots.release("a")
    assert slots.acquire("b") == 1
    assert slots.acquire("c") == 2
    assert slots.slot_of("a") == 0


def test_the_least_recently_used_idle_slot_goes_first() -> None:
    slots = Slots(3)
    for user in "abc":
        slots.acquire(user)
    for user in "bac":
        slots.release(user)
    assert slots.acquire("b") == 1
    slots.release("b")  # so b was used last
    assert slots.acquire("d") == 0
    assert slots.slot_of("a") is None
    assert slots.acquire("e") == 2
    assert slots.acquire("f") == 1


def test_busy_slots_are_never_given_away() -> None:
    slots = Slots(2)
    slots.acquire("a")
    slots.acquire("b")
    assert slots.acquire("c") is None
    assert (slots.slot_of("a"), slots.slot_of("b"), slots.slot_of("c")) == (0, 1, None)


def test_a_slot_that_is_not_kept_is_free_for_anybody() -> None:
    slots = Slots(3)
    for user in "abc":
        slots.acquire(user)
    slots.release("c", keep=False)
    slots.release("a", keep=False)
    assert slots.slot_of("a") is None
    assert slots.idle == 0
    assert slots.acquire("d") == 0
    assert slots.acquire("a") == 2


def test_a_user_never_gets_a_second_slot() -> None:
    slots = Slots(2)
    slots.acquire("a")
    with pytest.raises(RuntimeError, match="'a' holds slot 0 already"):
        slots.acquire("a")


@pytest.mark.parametrize("user", ["idle", "nobody"])
def test_only_a_busy_user_can_release(user: str) -> None:
    slots = Slots(2)
    slots.acquire("idle")
    slots.release("idle")
    with pytest.raises(KeyError):
        slots.release(user)


def test_users_are_told_apart_as_python_does() -> None:
    slots = Slots(2)
    assert slots.acquire(1) == 0
    assert slots.acquire("1") == 1


def test_the_books_of_every_state_are_in_order() -> None:
    slots = Slots(3)
    slots.check()
    slots.acquire("a")
    slots.acquire("b")
    slots.release("b")
    slots.check()


@pytest.mark.parametrize("wrong", [[], [0, 0], [0, 2]])
def test_a_slot_that_is_lost_or_doubled_is_noticed(wrong: list[int]) -> None:
    slots = Slots(2)
    slots._free = wrong
    with pytest.raises(RuntimeError, match="slots out of order: free"):
        slots.check()
