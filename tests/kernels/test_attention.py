"""Attention over each user's cache, against float64 and against itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from glm_multiuser.backends.native.kv_layout import STORED
from tests.kernels.attention_step import TABLE_ROWS, Shape, Step, Token, random_cache
from tests.kernels.calling import PROPERTY, bits, call
from tests.kernels.kv_caches import NAN, Cache, rounded
from tests.kernels.memory import placed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

PRECISION = {"float32": 1e-6, "bfloat16": 2.0**-8, "int8": 0.501 / 127}
"""How far what is kept may be off, of the number itself, with int8 of the largest in its row."""

shapes = st.builds(
    Shape,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 5, 16]),
    head_dim=st.sampled_from([2, 4, 8, 16, 24, 64, 80, 128]),
    parts=st.sampled_from([1, 2]),
    cache=st.sampled_from(list(STORED)),
)


@st.composite
def mixtures(draw: Any) -> tuple[Step, list[Cache]]:
    """Decoding users and users with prompts, in one step.

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


@pytest.mark.parametrize("head_dim", [2, 24, 64, 80])
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_partners_that_are_neighbours_or_half_a_head_away(cache: str, head_dim: int) -> None:
    numbers = np.arange(head_dim, dtype=np.int32)
    shape = Shape(kv_heads=2, group=2, head_dim=head_dim, cache=cache)
    for partner in numbers ^ 1, (numbers + head_dim // 2) % head_dim:
        step = replace(Step.random(shape, prompt(0, 15, 20), 0), partner=partner)
        caches = [random_cache(shape, 20, 15, 0)]
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
    values = step.value.reshape(keys.shape)
    for row, token in enumerate(step.tokens):
        cache = caches[token.user]
        written = cache.positions(token.position + 1)
        for found, expected in zip(written, (keys[row], values[row])):
            bound = np.abs(expected)
            if step.shape.cache == "int8":
                bound = bound.max(axis=-1, keepdims=True)
            off = PRECISION[step.shape.cache] * bound + 1e-6
            assert (np.abs(found[:, token.position] - expected) <= off).all()
        cache.forget(token.position)
    for after, was in zip(caches, before):
        assert bits(after.keys) == bits(was.keys)
        assert bits(after.values) == bits(was.values)


@given(st.data(), st.sampled_from([1, 2, 8, 24, 80]), st.integers(-38, 36))
@PROPERTY
def test_rows_are_rounded_as_numpy_rounds_them(
    data: st.DataObject, head_dim: int, exponent: int
) -> None:
    """Angles of zero turn nothing. A row may be zero, or have numbers half way between two."""
    cache = data.draw(st.sampled_from(list(STORED)))
    shape = Shape(head_dim=head_dim, cache=cache)
    step = Step.random(shape, prompt(0, 0, 20), data.draw(st.integers(0, 2**32 - 1)))
    step.cosine[...], step.sine[...] = 1, 0
    ties = np.arange(step.key.size, dtype=np.float32).reshape(step.key.shape) % 255 - 127.5
    ties[:, 0] = 127
    step.key[3:6], step.value[3:6] = ties[3:6], ties[6:9]
    step.key[2], step.value[4] = 0, 0
    power = np.float32(10.0**exponent)
    step.key, step.value = step.key * power, step.value * power
    caches = [random_cache(shape, 24, 0, seed=0)]
    step.run(caches)
    expected = [
        np.moveaxis(rows.reshape(20, shape.kv_heads, head_dim), 0, 1)
        for rows in (step.key, step.value)
    ]
    written = caches[0].rows(20)
    for found, rows in zip(written, expected):
        assert bits(found) == bits(rounded(rows, cache))


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
            cache.keys.view(np.uint8)[...] = cache.values.view(np.uint8)[...] = NAN
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
    assert bits(pieces[0].values) == bits(whole[0].values)


@pytest.mark.parametrize("both_directions", [False, True])
@pytest.mark.parametrize("cache", STORED)
def test_a_prompt_of_several_pieces(cache: str, both_directions: bool) -> None:
    """Of as many query rows as a piece may have, or fewer."""
    shape = Shape(kv_heads=2, group=2, head_dim=40, cache=cache)
    tokens = prompt(0, 0, 310)
    if both_directions:
        tokens = [replace(token, visible=310) for token in tokens]
    step = Step.random(shape, tokens, seed=3)
    caches = [random_cache(shape, 320, 0, seed=4)]
    whole = step.run(caches)
    expected, error = step.expected(caches)
    assert (np.abs(whole - expected) <= error).all()
    for rows in (range(1), range(37, 101), range(250, 310)):
        assert bits(step.only(list(rows)).run(caches)) == bits(whole[list(rows)])


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 72), (7, 20)])
def test_a_row_that_shares_registers_with_others_has_the_bits_of_one_alone(
    group: int, head_dim: int, cache: str
) -> None:
    """Blocks of all heights, whose rows see the ends of tiles and of blocks of positions."""
    shape = Shape(kv_heads=2, group=group, head_dim=head_dim, cache=cache)
    filled, count = 110, 40
    step = Step.random(shape, prompt(0, filled, filled + count), seed=1)
    decoded, entered = ([random_cache(shape, 160, filled, seed=2)] for _ in range(2))
    expected = [step.only([row]).run(decoded) for row in range(count)]
    begin, heights = 0, itertools.count(1)
    while begin < count:
        end = min(count, begin + next(heights))
        y = step.only(list(range(begin, end))).run(entered)
        assert bits(y) == bits(np.concatenate(expected[begin:end]))
        begin = end


@given(
    st.integers(2, 10),
    st.sampled_from([8, 24, 80]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from(list(STORED)),
)
@PROPERTY
def test_a_token_does_not_see_what_is_not_finite_behind_it(
    count: int, head_dim: int, bad: float, cache: str
) -> None:
    shape = Shape(head_dim=head_dim, cache=cache)
    step = Step.random(shape, prompt(0, 0, count), seed=1)
    expected = step.run([random_cache(shape, 20, 0, seed=2)])
    step.key[-1], step.value[-1] = bad, bad
    y = step.run([random_cache(shape, 20, 0, seed=2)])
    assert bits(y[:-1]) == bits(expected[:-1])
    assert not np.isfinite(y[-1]).any()


@pytest.mark.parametrize("cache", STORED)
def test_a_chunk_sees_no_value_behind_its_tokens(cache: str) -> None:
    """Whatever a thread computed before: memory that it uses again may hold anything."""
    shape = Shape(head_dim=64, cache=cache)
    step = Step.random(shape, prompt(0, 24, 50), seed=1)
    expected = step.run([random_cache(shape, 60, 24, seed=2)])
    step.value[16:] = np.nan
    for _ in range(2):
        y = step.run([random_cache(shape, 60, 24, seed=2)])
        assert bits(y[:16]) == bits(expected[:16])
        assert not np.isfinite(y[16:]).any()


@pytest.mark.parametrize(
    ("cache", "where", "bad"),
    [
        *((cache, where, np.nan) for cache in STORED for where in ("key", "value")),
        *((cache, "value", np.inf) for cache in STORED),
        ("int8", "key", np.inf),
        ("int8", "key", -np.inf),
    ],
)
def test_one_number_that_is_not_finite_spoils_its_own_head(
    cache: str, where: str, bad: float
) -> None:
    shape = Shape(kv_heads=2, group=1, head_dim=24, cache=cache)
    step = Step.random(shape, prompt(0, 20, 22), seed=1)
    expected = step.run([random_cache(shape, 30, 20, seed=2)])
    getattr(step, where)[0, 5] = bad
    y = step.run([random_cache(shape, 30, 20, seed=2)])
    assert not np.isfinite(y[:, :24]).all(axis=1).any()
    assert bits(y[:, 24:]) == bits(expected[:, 24:])


@pytest.mark.parametrize("cache", STORED)
@pytest.mark.parametrize("group", [1, 3, 64, 70])
def test_any_number_of_queries_may_share_keys(group: int, cache: str) -> None:
    shape = Shape(kv_heads=1, group=group, head_dim=8, cache=cache)
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


@example(16, "int8")
@given(st.integers(1, 150), st.sampled_from(list(STORED)))
@PROPERTY
def test_positions_that_nobody_sees_need_not_even_exist(filled: int, cache: str) -> None:
    shape = Shape(kv_heads=1, head_dim=24, cache=cache)
    full = random_cache(shape, filled + 500, filled, seed=9)
    step = Step.random(shape, prompt(0, filled, filled + 1), seed=10)
    expected = step.run([full.copy()])
    # A tile is cut off behind the last position of its last row.
    numbers = full.keys.shape[3]
    there = filled // 16 * numbers * 16 + (numbers - 1) * 16 + filled % 16 + 1
    keys = placed(full.keys.reshape(-1)[:there])
    values = placed(full.values[0, 0, : filled + 1].reshape(-1))
    cut = Cache(
        np.lib.stride_tricks.as_strided(keys, full.keys.shape, full.keys.strides),
        np.lib.stride_tricks.as_strided(values, full.values.shape, full.values.strides),
    )
    assert bits(step.run([cut])) == bits(expected)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("per_cell", [1, 2, 3, 5])
def test_users_may_share_a_cell(per_cell: int, dtype: str) -> None:
    shape = Shape(kv_heads=2, group=3, head_dim=24, parts=2, cache=dtype)
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
