"""Products of int8 inputs and group-quantised weights: sums of groups are integers, so every bit is
known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm_multiuser.backends.native.group_packing import GROUP_TYPES
from tests.kernels.calling import PROPERTY, bits, call
from tests.kernels.group_weights import DTYPES, TYPES
from tests.kernels.memory import placed
from tests.kernels.test_groups import Product
from tests.kernels.weights import round_to_int8

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

LINEAR = "linear_int8"
PART = 32
"""Inputs of a larger group that are summed up at a time."""


def fused(a: NDArray[Any], b: NDArray[Any], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 a * b + c, rounded once. The product is exact in float64. Their sum is rounded to an
    odd float64 where it is not exact, so that rounding it to float32 knows on which side it is."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total: NDArray[np.float64] = product + addend
    from_addend = total - product
    error = (product - (total - from_addend)) + (addend - from_addend)
    even = total.view(np.int64) % 2 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & even, np.nextafter(total, toward), total)
    return odd.astype(np.float32)


def test_fused_rounds_once() -> None:
    """Products in the middle between two float32, with a little more or less than nothing."""
    factor = np.full(3, 1 + 2.0**-12, np.float32)
    addends = np.array([0, 2.0**-60, -(2.0**-60)], np.float32)
    even, odd = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23
    assert fused(factor, factor, addends).tolist() == [even, odd, even]


def expected(product: Product) -> NDArray[np.float32]:
    """float32 arithmetic in the order that is promised: group by group the number of its scale, and
    that of its minimum, fused; then the scale of the row, its outliers, and the bias."""
    weight = product.weight
    numbers, row_scales, outliers = round_to_int8(product.x)
    whole, scales, minima = weight.numbers_and_scales()
    y = np.zeros((len(product.x), weight.packing.outputs), np.float32)
    group = whole.shape[1] // scales.shape[1]
    part = min(PART, group)
    for begin in range(0, whole.shape[1], part):
        x, w = numbers[:, begin : begin + part], whole[:, begin : begin + part]
        y = fused((x @ w.T).astype(np.float32), scales[:, begin // group], y)
        if minima is not None:
            total = x.sum(axis=1, keepdims=True).astype(np.float32)
            y = fused(total, minima[:, begin // group], y)
    y = y * row_scales
    values = weight.values()
    for place in outliers.T:
        value = np.take_along_axis(product.x, place[:, None], axis=1)
        y = y + value * values[:, place].T
    return y + product.bias


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(1, 150)),
    blocks=st.integers(1, 5),
    outputs=st.one_of(st.sampled_from([1, 31, 32, 33, 64]), st.integers(1, 200)),
    seed=st.integers(0, 2**32 - 1),
)
@example(rows=1, blocks=2, outputs=1000, seed=0)  # several panels to a piece
@example(rows=17, blocks=9, outputs=65, seed=0)
@example(rows=41, blocks=9, outputs=65, seed=0)
@PROPERTY
def test_every_bit(dtype: str, rows: int, blocks: int, outputs: int, seed: int) -> None:
    product = Product.random(LINEAR, dtype, rows, blocks, outputs, seed)
    assert bits(product.run()) == bits(expected(product))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("rows", [3, 30])
def test_largest_sums(dtype: str, sign: int, byte: int, rows: int) -> None:
    """All numbers of weights the smallest or the largest, and all inputs 127 or -127."""
    product = Product.random(LINEAR, dtype, rows, 2, 33)
    product.x[:] = sign
    blocks = product.weight.blocks.copy()
    generous = TYPES[dtype].bytes - GROUP_TYPES[dtype].inputs // 2
    blocks[..., generous:] = byte
    product.weight = dataclasses.replace(product.weight, blocks=blocks)
    if dtype == "q6_k":  # its scales lie behind its numbers
        product.weight.blocks[..., 192:] = 1
    assert bits(product.run()) == bits(expected(product))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype: str) -> None:
    """Each of them has the bits that it has alone, on tiles and without."""
    product = Product.random("linear_add_int8", dtype, 40, 7, 70)
    alone = [product.rows([row]).run() for row in range(40)]
    for rows in range(1, 41):
        assert bits(product.rows(slice(rows)).run()) == bits(np.concatenate(alone[:rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 13, 30])
def test_a_row_that_is_not_finite_is_not_a_number(dtype: str, rows: int) -> None:
    product = Product.random(LINEAR, dtype, rows, 1, 40)
    whole = product.run()
    for bad in (np.nan, np.inf, -np.inf):
        product.x[0, 7] = bad
        y = product.run()
        assert np.isnan(y[0]).all()
        assert bits(y[1:]) == bits(whole[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [0, 1, 6, 15, 26])
def test_rows_behind_the_used_ones_are_not_read_and_not_written(dtype: str, used: int) -> None:
    product = Product.random(LINEAR, dtype, 40, 1, 45)
    x = placed(product.x[:used], product.x.shape)
    residual = placed(product.residual[:used], product.residual.shape)
    output = np.full((40, 45), np.nan, np.float32)
    arguments = product.arguments(x, residual, used)
    assert call(LINEAR, *arguments, output) == 0
    assert np.isnan(output[used:]).all()
    assert bits(output[:used]) == bits(expected(product)[:used])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [4, 30])
def test_rows_of_nothing_and_of_almost_nothing(dtype: str, rows: int) -> None:
    product = Product.random(LINEAR, dtype, rows, 1, 40)
    product.x[0] = 0
    product.x[1] *= np.float32(1e-40)
    product.x[2] *= np.float32(1e-25)
    y = product.run()
    assert bits(y) == bits(expected(product))
    assert bits(y[0]) == bits(product.bias)
