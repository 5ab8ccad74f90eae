"""Products of int8 inputs and int8 weights: integers, so every bit is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser.backends.native.packing import PANEL, Packing
from tests.kernels.calling import bits, call, number
from tests.kernels.test_linear import Product
from tests.kernels.weights import int8_numbers, pack_whole, round_to_int8, unpacked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

KIND = "int8, inputs int8"


def expected(product: Product) -> NDArray[np.float32]:
    """float32 arithmetic in the order that is promised."""
    numbers, row_scales, outliers = round_to_int8(product.x)
    weight = int8_numbers(product.packing, product.packed)
    sums = numbers @ weight.T
    assert np.abs(sums).max() < 2**31
    scales = np.ascontiguousarray(product.packed[:, : 4 * PANEL]).view(np.float32).reshape(-1)
    y = sums.astype(np.float32) * row_scales
    for place in outliers.T:
        value = np.take_along_axis(product.x, place[:, None], axis=1)
        y = y + value * weight.astype(np.float32)[:, place].T
    return y * scales[: product.packing.outputs] + product.bias


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 6, 7, 63, 64, 65, 126, 127, 129, 1023, 1026])
@pytest.mark.parametrize("outputs", [1, 17, 32, 70])
def test_every_bit(inputs: int, outputs: int) -> None:
    product = Product.random("linear", KIND, 13, inputs, outputs, seed=inputs)
    assert bits(product.run()) == bits(expected(product))


@pytest.mark.parametrize("inputs", [1, 130, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(inputs: int, sign: int) -> None:
    product = Product.random("linear", KIND, 3, inputs, 33)
    product.x[:] = sign
    product.packed = pack_whole(product.packing, np.ones((33, inputs), np.float32))
    assert bits(product.run()) == bits(expected(product))


def test_more_inputs_than_sums_can_hold_are_rejected() -> None:
    most = 1 << 17
    packing = Packing("int8", 1, most + 2)
    for inputs, refused in ((most, False), (most + 2, True)):
        x = np.ones((1, inputs), np.float32)
        weight = np.full((1, 4 * PANEL + inputs * PANEL), 127, np.int8)
        weight[:, : 4 * PANEL] = np.ones(PANEL, np.float32).view(np.int8)
        y = np.zeros((1, 1), np.float32)
        code = call("linear_int8", x, number(1), weight, np.zeros(1, np.float32), y)
        assert (code != 0) == refused
        assert y[0, 0] == (0 if refused else 127 * most)
    assert packing.shape == weight.shape


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_weights_have_inputs_in_float32(dtype: str) -> None:
    product = Product.random("linear", dtype, 7, 8, 40)
    assert product.finish == "linear"
    whole = dataclasses.replace(product, finish="linear_int8")
    assert bits(whole.run()) == bits(product.run())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20])
def test_a_row_that_is_not_finite_is_not_a_number(bad: float, place: int) -> None:
    product = Product.random("linear", KIND, 5, 21, 40)
    whole = expected(product)
    product.x[2, place] = bad
    y = product.run()
    assert np.isnan(y[2]).all()
    assert bits(np.delete(y, 2, axis=0)) == bits(np.delete(whole, 2, axis=0))


def test_rows_of_nothing_and_of_almost_nothing() -> None:
    product = Product.random("linear", KIND, 4, 37, 40)
    product.x[0] = 0
    product.x[1] *= np.float32(1e-40)
    product.x[2] *= np.float32(1e-25)
    y = product.run()
    assert bits(y) == bits(expected(product))
    assert bits(y[0]) == bits(product.bias)


def test_huge_numbers() -> None:
    product = Product.random("linear", KIND, 2, 9, 33)
    product.x[0] = 2e34
    product.packed = pack_whole(product.packing, np.full((33, 9), 1e-3, np.float32))
    y = product.run()
    assert np.isfinite(y).all()
    assert bits(y) == bits(expected(product))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 300])
def test_equal_magnitudes(count: int) -> None:
    """Of them the first are outliers."""
    product = Product.random("linear", KIND, 3, 301, 40)
    places = np.random.default_rng(count).permutation(301)[:count]
    product.x[:, places] = np.where(places % 2, 7, -7).astype(np.float32)
    assert bits(product.run()) == bits(expected(product))


def test_outliers_do_not_make_the_other_inputs_coarse() -> None:
    product = Product.random("linear", KIND, 2, 300, 40)
    product.x[:, [0, 17, 130, 299]] = [[1e3, -2e3, 3e3, 500], [-7, 1e3, 0, 9]]
    weight = unpacked(product.packing, product.packed)
    exact = product.x.astype(np.float64) @ weight.T + product.bias
    # A step of the other inputs is about 3 / 127; that of 3e3 would be 24.
    assert np.abs(product.run() - exact).max() < 1
