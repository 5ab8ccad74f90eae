"""Levels agree with each other; each agrees with float64 in the other files."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from glm_multiuser.backends.native.packing import STORED
from tests.kernels.attention_step import Shape, Step, Token, random_cache
from tests.kernels.calling import bits, levels_here
from tests.kernels.test_linear import Product


def test_the_best_level_is_the_first_that_there_is(best_level: ctypes.CDLL) -> None:
    names = levels_here()
    assert names[-1] == "plain"
    assert best_level.glm_force_level(b"") == 1
    assert best_level.glm_level() == names[0].encode()


def test_a_level_that_does_not_exist_changes_nothing(best_level: ctypes.CDLL) -> None:
    assert best_level.glm_force_level(b"plain") == 1
    assert best_level.glm_force_level(b"avx9000") == 0
    assert best_level.glm_level() == b"plain"


@pytest.mark.parametrize("dtype", STORED)
def test_products(best_level: ctypes.CDLL, dtype: str) -> None:
    product = Product.random("linear_gelu", dtype, 13, 77, 45)
    answers = []
    for name in levels_here():
        best_level.glm_force_level(name.encode())
        answers.append(product.run())
    for answer in answers:
        assert np.abs(answer - answers[0]).max() < 1e-4


@pytest.mark.parametrize("rows", [1, 13])
def test_products_of_int8_have_the_same_bits_at_every_level(
    best_level: ctypes.CDLL, rows: int
) -> None:
    product = Product.random("linear", "int8, inputs int8", rows, 1027, 45)
    answers = set()
    for name in levels_here():
        best_level.glm_force_level(name.encode())
        answers.add(bits(product.run()))
    assert len(answers) == 1


def test_attention(best_level: ctypes.CDLL) -> None:
    shape = Shape(head_dim=80)
    tokens = [Token(0, position, position + 1, (position,)) for position in range(40)]
    answers = []
    for name in levels_here():
        best_level.glm_force_level(name.encode())
        answers.append(Step.random(shape, tokens, 0).run([random_cache(shape, 40, 0, 0)]))
    for answer in answers:
        assert np.abs(answer - answers[0]).max() < 1e-4
