"""Out-of-bounds arguments are rejected before anything is written."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser.backends.native.kv_layout import STORED
from tests.kernels.attention_step import TABLE_ROWS, Shape, Step, Token, random_cache
from tests.kernels.calling import bits, call
from tests.kernels.kv_caches import Cache

pytestmark = pytest.mark.usefixtures("level")

CAPACITY = 20
GOOD = Token(user=1, position=4, visible=5, angles=(4, 4))

BAD = {
    "user before the first": Token(-1, 4, 5, (4, 4)),
    "user behind the last": Token(2, 4, 5, (4, 4)),
    "position before the first": Token(1, -1, 5, (4, 4)),
    "position behind the last": Token(1, CAPACITY, 5, (4, 4)),
    "position behind the last, of a tile that exists": Token(0, CAPACITY - 5, 5, (4, 4)),
    "sees nothing": Token(1, 4, 0, (4, 4)),
    "sees more than there is": Token(1, 4, CAPACITY + 1, (4, 4)),
    "angle before the first": Token(1, 4, 5, (-1, 4)),
    "angle behind the last": Token(1, 4, 5, (TABLE_ROWS, 4)),
    "second angle behind the last": Token(1, 4, 5, (4, TABLE_ROWS)),
}


def caches_of(shape: Shape) -> list[Cache]:
    return [random_cache(shape, CAPACITY - 5, 15, 0), random_cache(shape, CAPACITY, 20, 1)]


def refused(step: Step, change: Callable[..., object] = lambda arguments: None) -> None:
    """Checks that it is, and that nothing was written."""
    caches, before = caches_of(step.shape), caches_of(step.shape)
    output = np.full((len(step.tokens), step.shape.heads * step.shape.head_dim), 7, np.float32)
    arguments = step.arguments(caches, len(step.tokens))
    change(arguments)
    assert call("attention", *arguments, output) != 0
    assert (output == 7).all()
    for cache, was in zip(caches, before):
        assert bits(cache.keys) == bits(was.keys)
        assert bits(cache.values) == bits(was.values)


@pytest.mark.parametrize("fault", BAD)
def test_tokens_that_lead_elsewhere(fault: str) -> None:
    refused(Step.random(Shape(parts=2), [GOOD, BAD[fault]], seed=0))


def test_caches_without_values() -> None:
    refused(Step.random(Shape(parts=2), [GOOD], seed=0), lambda arguments: arguments.pop())


def test_no_caches() -> None:
    def remove(arguments: list[object]) -> None:
        del arguments[10:]

    refused(Step.random(Shape(parts=2), [GOOD], seed=0), remove)


def test_caches_without_an_axis_for_users() -> None:
    def flatten(arguments: list[NDArray[Any]]) -> None:
        arguments[10:] = [cache[0] for cache in arguments[10:]]

    refused(Step.random(Shape(parts=2), [GOOD], seed=0), flatten)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 0), (4, 3), (0, 4)])
def test_heads_that_cannot_share_keys(heads: int, kv_heads: int) -> None:
    """Everything else has the shapes that these numbers ask for."""

    def change(arguments: list[NDArray[Any]]) -> None:
        head_dim = int(arguments[8][2])
        arguments[0] = np.zeros((1, (heads + 2 * kv_heads) * head_dim), np.float32)
        arguments[8] = np.array([heads, kv_heads, head_dim], np.int32)
        arguments[10:] = [cache[:, :kv_heads].copy() for cache in arguments[10:]]

    refused(Step.random(Shape(kv_heads=4, group=1, parts=2), [GOOD], seed=0), change)


@pytest.mark.parametrize("place", [10, 11], ids=["keys", "values"])
def test_caches_of_fewer_heads(place: int) -> None:
    def change(arguments: list[NDArray[Any]]) -> None:
        arguments[place] = arguments[place][:, 1:].copy()

    refused(Step.random(Shape(kv_heads=2, parts=2), [GOOD], seed=0), change)


@pytest.mark.parametrize("cache", STORED)
def test_caches_of_several_types(cache: str) -> None:
    def change(arguments: list[NDArray[Any]]) -> None:
        other = np.int8 if cache == "float32" else np.float32
        arguments[-1] = np.zeros(arguments[-1].shape, other)

    refused(Step.random(Shape(parts=2, cache=cache), [GOOD], seed=0), change)


@pytest.mark.parametrize("dtype", [np.float16, np.uint8, np.float64])
def test_caches_of_a_type_that_there_is_not(dtype: Any) -> None:
    def change(arguments: list[NDArray[Any]]) -> None:
        arguments[10:] = [np.zeros(one.shape, dtype) for one in arguments[10:]]

    refused(Step.random(Shape(parts=2), [GOOD], seed=0), change)


def test_caches_without_room_for_scales() -> None:
    def change(arguments: list[NDArray[Any]]) -> None:
        arguments[10:] = [np.zeros(one.shape, np.int8) for one in arguments[10:]]

    refused(Step.random(Shape(parts=2), [GOOD], seed=0), change)


def test_tables_that_do_not_fit_the_head() -> None:
    step = Step.random(Shape(parts=2), [GOOD], seed=0)
    step.cosine, step.sine = step.cosine[:, :-1].copy(), step.sine[:, :-1].copy()
    refused(step)


def test_what_is_wrong_behind_the_used_tokens_does_no_harm() -> None:
    step = Step.random(Shape(parts=2), [GOOD, BAD["user behind the last"]], seed=0)
    y = step.only([0]).run(caches_of(step.shape), height=2)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
