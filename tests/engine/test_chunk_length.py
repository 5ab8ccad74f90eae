"""Chunk lengths, with step times from a formula instead of a clock."""

from __future__ import annotations

from typing import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.engine.chunk_length import FIRST, LEAST, ChunkLength

Seconds = Callable[[int, int], float]
"""What a step takes: (tokens of prompts, requests that decode)."""

LONGEST = 256


def memory_or_arithmetic(read: float, row: float) -> Seconds:
    """A step reads all weights, and meanwhile multiplies rows."""
    return lambda tokens, decoding: max(read, row * (tokens + decoding))


def after(length: ChunkLength, seconds: Seconds, decoding: int, chunks: int) -> list[float]:
    """Some plain steps and then so many chunks -> what those took, in plain steps."""
    plain = seconds(0, decoding)
    for _ in range(5):
        length.measured(0, decoding, plain)
    found = []
    for _ in range(chunks):
        tokens = length.tokens(decoding)
        found.append(seconds(tokens, decoding) / plain)
        length.measured(tokens, decoding, seconds(tokens, decoding))
    return found


def test_a_prompt_has_the_whole_step_where_nobody_decodes() -> None:
    length = ChunkLength(LONGEST, is_fixed=False)
    assert (length.tokens(0), length.tokens(1)) == (LONGEST, FIRST)
    after(length, memory_or_arithmetic(1.0, 1.0), 3, 20)
    assert (length.tokens(0), length.tokens(3)) == (LONGEST, LEAST)


def test_the_length_that_a_user_set_is_kept() -> None:
    length = ChunkLength(40, is_fixed=True)
    for row in (1e-9, 1e9):
        after(length, memory_or_arithmetic(1.0, row), 3, 20)
        assert (length.tokens(0), length.tokens(1), length.tokens(9)) == (40, 40, 40)


@pytest.mark.parametrize("longest", [1, LEAST - 1, LEAST, FIRST - 1, FIRST])
@pytest.mark.parametrize("row", [1e-9, 1e9])
def test_no_step_has_more_tokens_than_there_is_room(longest: int, row: float) -> None:
    length = ChunkLength(longest, is_fixed=False)
    after(length, memory_or_arithmetic(1.0, row), 2, 20)
    assert length.tokens(0) == longest
    assert min(LEAST, longest) <= length.tokens(1) <= longest


def test_tokens_that_cost_nothing_fill_the_step() -> None:
    length = ChunkLength(LONGEST, is_fixed=False)
    after(length, lambda tokens, decoding: 1.0, 1, 20)
    assert length.tokens(1) == LONGEST


@settings(derandomize=True, max_examples=200, deadline=None)
@given(free_rows=st.floats(0.5, 300), decoding=st.integers(1, 32), before=st.floats(0.5, 300))
def test_who_decodes_waits_two_and_a_half_steps_at_most(
    free_rows: float, decoding: int, before: float
) -> None:
    """Also after another model of what steps take, as when something else has used the machine."""
    length = ChunkLength(LONGEST, is_fixed=False)
    after(length, memory_or_arithmetic(1.0, 1 / before), decoding, 20)
    seconds = memory_or_arithmetic(1.0, 1 / free_rows)
    for _ in range(5):
        waits = after(length, seconds, decoding, 20)
    assert all(wait <= 2.5 or length.beside == LEAST for wait in waits)
    # And chunks are no shorter than need be.
    assert waits[-1] >= 1.5 or length.beside == LONGEST


def test_one_disturbed_step_changes_nothing() -> None:
    length = ChunkLength(LONGEST, is_fixed=False)
    seconds = memory_or_arithmetic(1.0, 1 / 20)
    after(length, seconds, 4, 40)
    before = length.beside
    length.measured(length.beside, 4, 50.0)
    assert length.beside == before
    length.measured(0, 4, 50.0)
    for _ in range(20):
        length.measured(length.beside, 4, seconds(length.beside, 4))
    assert length.beside == pytest.approx(before, rel=0.1)


def test_a_prompt_begins_with_half_the_length() -> None:
    """What a token took for the one before, with other users, says little about it."""
    length = ChunkLength(LONGEST, is_fixed=False)
    after(length, memory_or_arithmetic(1.0, 1 / 90), 4, 40)
    before = length.beside
    for _ in range(3):
        length.measured(0, 4, 1.0)
    assert length.beside == before // 2 > LEAST


def test_the_end_of_a_prompt_says_nothing() -> None:
    length = ChunkLength(LONGEST, is_fixed=False)
    after(length, memory_or_arithmetic(1.0, 1 / 20), 4, 40)
    before = length.beside
    for seconds in (1.0, 50.0) * 9:
        length.measured(before - 1, 4, seconds)
    assert length.beside == before


def test_nothing_is_concluded_before_a_plain_step() -> None:
    length = ChunkLength(LONGEST, is_fixed=False)
    for seconds in (1.0, 50.0):
        length.measured(FIRST, 4, seconds)
        length.measured(LONGEST, 0, seconds)
    assert length.beside == FIRST
