"""Attention over every user's own cache, against float64 and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.attention_step import TABLE_ROWS, Cache, Shape, Step, Token, random_cache
from tests.kernels.calling import PROPERTY, bits, call
from tests.kernels.memory import placed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

shapes = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5, 16]),
    head_dim=st.sampled_from([2, 4, 8, 16, 24, 64, 80, 128]),
    parts=st.sampled_from([1, 2]),
)


@st.composite
def mixtures(draw: Any) -> tuple[Step, list[Cache]]:
    """Users that decode and users that bring prompts, in one step.

    The tokens of a prompt see those before them, or all of it.
    """
    shape, seed = draw(shapes), draw(st.integers(0, 2**32 - 1))
    caches, tokens = [], []
    for user in range(draw(st.integers(1, 5))):
        filled = draw(st.sampled_from([0, 1, 15, 16, 17, 100, 127, 128, 129, 260]))
        fewest = 1 if filled == 0 or user == 0 else 0
        count = draw(st.one_of(st.integers(fewest, 1), st.integers(fewest, 40)))
        end, both_directions = filled + count, draw(st.booleans())
        caches.append(random_cache(shape, end + draw(st.integers(0, 20)), filled, seed + user))
        for position in range(filled, end):
            angles = [position * 7 + part * 11 + user for part in range(shape.parts)]
            visible = end if both_directions else position + 1
            tokens.append(Token(user, position, visible, tuple(a % TABLE_ROWS for a in angles)))
    if draw(st.booleans()):
        tokens = [tokens[place] for place in np.random.default_rng(seed).permutation(len(tokens))]
    return Step.random(shape, tokens, seed), caches


def prompt(user: int, begin: int, end: int, parts: int = 1) -> list[Token]:
    return [
        Token(user, position, position + 1, (position % TABLE_ROWS,) * parts)
        for position in range(begin, end)
    ]


def copies(caches: list[Cache]) -> list[Cache]:
    return [cache.copy() for cache in caches]


@given(mixtures())
@PROPERTY
def test_contexts(mixture: tuple[Step, list[Cache]]) -> None:
    step, caches = mixture
    y = step.run(caches)
    expected, error = step.expected(caches)
    assert (np.abs(y - expected) <= error).all()


@given(mixtures())
@PROPERTY
def test_caches_get_the_new_rows_and_nothing_else(mixture: tuple[Step, list[Cache]]) -> None:
    step, caches = mixture
    before = copies(caches)
    step.run(caches)
    keys = step.turned(step.key, step.shape.kv_heads)
    for row, token in enumerate(step.tokens):
        cache = caches[token.user]
        for written, expected in (
            (cache.keys[0, :, token.position // 16, :, token.position % 16], keys[row]),
            (cache.values[0, :, token.position], step.value[row].reshape(keys[row].shape)),
        ):
            assert np.allclose(written, expected, rtol=1e-6, atol=1e-6)
            written[...] = np.nan  # as it was before
    for after, was in zip(caches, before):
        assert bits(after.keys) == bits(was.keys)
        assert bits(after.values) == bits(was.values)


@given(mixtures(), st.data())
@PROPERTY
def test_bits_of_a_token_do_not_depend_on_other_users(
    mixture: tuple[Step, list[Cache]], data: st.DataObject
) -> None:
    step, caches = mixture
    before = copies(caches)
    together = step.run(caches, height=len(step.tokens) + data.draw(st.integers(0, 9)))
    user = data.draw(st.sampled_from(step.tokens)).user if step.tokens else 0
    rows = [row for row, token in enumerate(step.tokens) if token.user == user]
    for other, cache in enumerate(before):
        if other != user:
            cache.keys[...], cache.values[...] = np.inf, np.nan
    alone = step.only(rows).run(before)
    assert bits(together[rows]) == bits(alone)
    assert bits(caches[user].keys) == bits(before[user].keys)
    assert bits(caches[user].values) == bits(before[user].values)


@given(shapes, st.integers(0, 200), st.integers(1, 150), st.data())
@PROPERTY
def test_a_prompt_in_chunks_is_the_prompt_whole(
    shape: Shape, filled: int, count: int, data: st.DataObject
) -> None:
    step = Step.random(shape, prompt(0, filled, filled + count, shape.parts), seed=1)
    whole, pieces = ([random_cache(shape, filled + count + 3, filled, seed=2)] for _ in range(2))
    expected = step.run(whole)
    begin = 0
    while begin < count:
        end = min(count, begin + data.draw(st.integers(1, 70), "chunk"))
        y = step.only(list(range(begin, end))).run(pieces)
        assert bits(y) == bits(expected[begin:end])
        begin = end
    assert bits(pieces[0].keys) == bits(whole[0].keys)


@given(st.integers(2, 10), st.sampled_from([8, 24, 80]), st.sampled_from([np.nan, np.inf]))
@PROPERTY
def test_a_token_does_not_see_what_is_not_finite_behind_it(
    count: int, head_dim: int, bad: float
) -> None:
    shape = Shape(head_dim=head_dim)
    step = Step.random(shape, prompt(0, 0, count), seed=1)
    expected = step.run([random_cache(shape, 20, 0, seed=2)])
    step.key[-1], step.value[-1] = bad, bad
    y = step.run([random_cache(shape, 20, 0, seed=2)])
    assert bits(y[:-1]) == bits(expected[:-1])
    assert not np.isfinite(y[-1]).any()


@pytest.mark.parametrize("group", [1, 3, 64, 70])
def test_any_number_of_queries_may_share_keys(group: int) -> None:
    shape = Shape(kv_heads=1, group=group, head_dim=8)
    step = Step.random(shape, [*prompt(0, 5, 90), *prompt(1, 0, 1)], seed=3)
    caches = [random_cache(shape, 100, 5, seed=4), random_cache(shape, 1, 0, seed=5)]
    y = step.run(caches)
    expected, error = step.expected(caches)
    assert (np.abs(y - expected) <= error).all()


def test_many_users_decode_at_once() -> None:
    shape = Shape()
    lengths = np.random.default_rng(0).integers(0, 200, 64).tolist()
    caches = [random_cache(shape, n + 1 + n % 5, n, seed=n) for n in lengths]
    tokens = [token for user, n in enumerate(lengths) for token in prompt(user, n, n + 1)]
    step = Step.random(shape, tokens, seed=6)
    y = step.run(caches)
    expected, error = step.expected(caches)
    assert (np.abs(y - expected) <= error).all()


@given(st.integers(-4, 30), st.sampled_from([0.3, 30.0]))
@PROPERTY
def test_huge_scores(exponent: int, scale: float) -> None:
    """The largest score takes everything, where others are too small to count."""
    shape = Shape(kv_heads=1, group=1, head_dim=8)
    step = Step.random(shape, prompt(0, 2, 3), seed=7)
    step.scale = scale
    step.query = (step.query * np.float64(10.0**exponent)).astype(np.float32)
    caches = [random_cache(shape, 3, 2, seed=8)]
    y = step.run(caches)
    expected, error = step.expected(caches)
    assert (np.abs(y - expected) <= np.minimum(error, 1e-2)).all()


@example(16)
@given(st.integers(1, 150))
@PROPERTY
def test_positions_that_nobody_sees_need_not_even_exist(filled: int) -> None:
    shape = Shape(kv_heads=1, head_dim=24)
    full = random_cache(shape, filled + 500, filled, seed=9)
    step = Step.random(shape, prompt(0, filled, filled + 1), seed=10)
    expected = step.run([full.copy()])
    # A tile is cut off behind the last position of its last row.
    there = filled // 16 * 24 * 16 + 23 * 16 + filled % 16 + 1
    keys = placed(full.keys.reshape(-1)[:there])
    values = placed(full.values[0, 0, : filled + 1].reshape(-1))
    cut = Cache(
        np.lib.stride_tricks.as_strided(keys, full.keys.shape, full.keys.strides),
        np.lib.stride_tricks.as_strided(values, full.values.shape, full.values.strides),
    )
    assert bits(step.run([cut])) == bits(expected)


@pytest.mark.parametrize("per_cell", [1, 2, 3, 5])
def test_users_may_share_a_cell(per_cell: int) -> None:
    shape = Shape(kv_heads=2, group=3, head_dim=24, parts=2)
    caches = [random_cache(shape, 40, 20, seed) for seed in range(5)]
    tokens = [token for user in (3, 0, 4, 2, 1) for token in prompt(user, 20, 21 + user, 2)]
    step = Step.random(shape, tokens, 8)
    alone, together = copies(caches), copies(caches)
    expected = step.run(alone)
    cells = [together[first : first + per_cell] for first in range(0, 5, per_cell)]
    shared = [
        Cache(
            placed(np.concatenate([cache.keys for cache in cell])),
            placed(np.concatenate([cache.values for cache in cell])),
        )
        for cell in cells
    ]
    np.testing.assert_array_equal(bits(step.run(shared)), bits(expected))
    for user, cache in enumerate(alone):
        cell, row = divmod(user, per_cell)
        np.testing.assert_array_equal(bits(shared[cell].keys[row]), bits(cache.keys[0]))
        np.testing.assert_array_equal(bits(shared[cell].values[row]), bits(cache.values[0]))
    outside = Step.random(shape, [Token(5, 1, 2, (0, 0))], 9)
    output = placed(np.zeros((1, 6 * 24), np.float32))
    assert call("attention", *outside.arguments(shared, 1), output) != 0
