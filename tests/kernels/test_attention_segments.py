"""Attention over more positions than a segment has, and how threads share segments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Callable

import numpy as np
import pytest

from glm_multiuser.backends.native.kv_layout import STORED
from tests.kernels.attention_step import TABLE_ROWS, Shape, Step, Token, random_cache
from tests.kernels.calling import bits
from tests.kernels.kv_caches import Cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

SEGMENT = 2048
LENGTHS = [SEGMENT, SEGMENT + 1, 2 * SEGMENT + 300]


@pytest.fixture
def set_threads(kernels: ctypes.CDLL) -> Iterator[Callable[[int], None]]:
    before = kernels.glm_threads()
    yield kernels.glm_set_threads
    kernels.glm_set_threads(before)


def tokens_of(user: int, begin: int, end: int) -> list[Token]:
    return [Token(user, at, at + 1, (at % TABLE_ROWS,)) for at in range(begin, end)]


def last_tokens(shape: Shape, length: int, count: int, seed: int = 0) -> tuple[Step, Cache]:
    """The last tokens of a conversation of one user, and the cache of those before."""
    begin = length - count
    step = Step.random(shape, tokens_of(0, begin, length), seed)
    return step, random_cache(shape, length + 5, begin, seed)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 24)])
def test_contexts(cache: str, length: int, group: int, head_dim: int) -> None:
    shape = Shape(kv_heads=2, group=group, head_dim=head_dim, cache=cache)
    for count in (1, 40):
        step, own = last_tokens(shape, length, count)
        y = step.run([own])
        expected, error = step.expected([own])
        assert (np.abs(y - expected) <= error).all()


@pytest.mark.parametrize(("count", "power"), [(1, 0), (2, -38), (50, 0), (300, 0)])
@pytest.mark.parametrize("cache", STORED)
def test_bits_do_not_depend_on_how_segments_are_divided(
    set_threads: Callable[[int], None], cache: str, count: int, power: int
) -> None:
    """Four key heads are enough for one thread; more threads divide the segments of each.

    With a power of -38, contexts are subnormal numbers.
    """
    shape = Shape(kv_heads=4, group=2, head_dim=24, cache=cache)
    step, own = last_tokens(shape, 2 * SEGMENT + 100, count)
    step.value = step.value * np.float32(10.0**power)
    own.values[...] = 0
    found = []
    for threads in (1, 2, 7):
        set_threads(threads)
        found.append(bits(step.run([own.copy()])))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("cache", STORED)
def test_alone_as_among_others(cache: str) -> None:
    """Alone, segments are divided; among so many users each thread has enough to do."""
    shape = Shape(kv_heads=1, group=2, head_dim=16, cache=cache)
    lengths = [SEGMENT + 50 * user for user in range(1, 25)]
    caches = [random_cache(shape, length + 1, length, length) for length in lengths]
    tokens = [t for user, length in enumerate(lengths) for t in tokens_of(user, length, length + 1)]
    step = Step.random(shape, tokens, seed=1)
    before = [own.copy() for own in caches]
    together = step.run(caches)
    for user in (0, 7, 23):
        assert bits(step.only([user]).run(before)) == bits(together[[user]])


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("sizes", [[1, 29, 70], [37, 63]])
def test_a_prompt_in_chunks_is_the_prompt_whole(cache: str, sizes: list[int]) -> None:
    """The prompt goes past the end of a segment."""
    shape = Shape(kv_heads=2, group=3, head_dim=40, cache=cache)
    step, own = last_tokens(shape, SEGMENT + 70, 100)
    whole, chunks = own.copy(), own.copy()
    expected = step.run([whole])
    begin = 0
    for size in sizes:
        rows = list(range(begin, begin + size))
        assert bits(step.only(rows).run([chunks])) == bits(expected[rows])
        begin += size
    assert bits(chunks.keys) == bits(whole.keys)
    assert bits(chunks.values) == bits(whole.values)


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("power", [0, -36.5, -37])
def test_a_chunk_past_the_end_of_a_segment_has_the_bits_of_its_tokens(
    cache: str, power: float
) -> None:
    """Its first tokens see one segment. Small contexts are subnormal numbers."""
    shape = Shape(kv_heads=1, group=2, head_dim=24, cache=cache)
    step, own = last_tokens(shape, SEGMENT + 20, 40)
    step.value = step.value * np.float32(10.0**power)
    own.values[...] = 0
    together = step.run([own.copy()])
    for row in range(40):
        assert bits(step.only([row]).run([own])) == bits(together[[row]])


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("at", [0, SEGMENT - 1, SEGMENT + 400])
def test_a_number_that_is_not_finite_spoils_who_sees_it(cache: str, at: int) -> None:
    shape = Shape(kv_heads=1, group=2, head_dim=24, cache=cache)
    length = SEGMENT + 420
    step, own = last_tokens(shape, length, 2)
    # One row sees all positions, the other those before the one that is not finite.
    first = replace(step.tokens[0], visible=max(at, 1))
    step.tokens = [first, step.tokens[1]]
    spoilt = own.copy()
    expected = step.run([own])
    spoilt.forget(at)
    y = step.run([spoilt])
    assert not np.isfinite(y[1]).any()
    if at > 0:
        assert bits(y[:1]) == bits(expected[:1])
