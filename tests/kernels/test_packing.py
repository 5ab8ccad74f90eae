"""Packed weights: nothing is lost beyond the precision of the type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_multiuser.backends.native.packing import PANEL, STORED, Packing
from glm_multiuser.bfloat16 import BITS, from_bfloat16, is_finite, to_bfloat16
from tests.kernels.calling import PROPERTY
from tests.kernels.weights import pack_whole, round_to_bfloat16, unpacked, unpacked_bits

SHAPES = [(1, 1), (31, 7), (32, 2), (33, 8), (70, 45), (70, 129), (2053, 3), (5, 300)]


def random(outputs: int, inputs: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", STORED)
def test_packed_array_has_the_shape_and_type_that_are_announced(
    dtype: str, outputs: int, inputs: int
) -> None:
    packing = Packing(dtype, outputs, inputs)
    packed = pack_whole(packing, random(outputs, inputs))
    assert (packed.shape, packed.dtype) == (packing.shape, np.dtype(STORED[dtype]))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_float32_comes_back_as_it_was(outputs: int, inputs: int) -> None:
    weight, packing = random(outputs, inputs), Packing("float32", outputs, inputs)
    assert np.array_equal(unpacked(packing, pack_whole(packing, weight)), weight)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bfloat16_comes_back_rounded(outputs: int, inputs: int) -> None:
    weight, packing = random(outputs, inputs), Packing("bfloat16", outputs, inputs)
    back = unpacked(packing, pack_whole(packing, weight))
    assert np.array_equal(back, round_to_bfloat16(weight))
    assert (np.abs(back - weight) <= np.abs(weight) * 2.0**-8).all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_float16_comes_back_rounded(outputs: int, inputs: int) -> None:
    weight, packing = random(outputs, inputs), Packing("float16", outputs, inputs)
    back = unpacked(packing, pack_whole(packing, weight))
    assert np.array_equal(back, weight.astype(np.float16))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_packed_as_they_are(dtype: str, outputs: int, inputs: int) -> None:
    """All of them: subnormal ones, both zeros, infinity and NaN."""
    packing = Packing(dtype, outputs, inputs)
    generator = np.random.default_rng(0)
    stored = generator.integers(0, 1 << 16, (outputs, inputs), np.uint16)
    values = stored.view(np.float16 if dtype == "float16" else BITS)
    packed = pack_whole(packing, values).view(np.uint16)
    assert np.array_equal(unpacked_bits(packing, packed), stored)


@given(
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.integers(-45, 38),
    st.data(),
)
@PROPERTY
def test_int8_is_half_a_step_off_at_most(
    outputs: int, inputs: int, seed: int, exponent: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.uniform(-1, 1, (outputs, inputs)) * np.float64(10.0**exponent)
    weight = weight.astype(np.float32)
    weight[data.draw(st.integers(0, outputs - 1))] = 0
    packing = Packing("int8", outputs, inputs)
    back = unpacked(packing, pack_whole(packing, weight))
    steps = np.abs(weight).max(axis=1, keepdims=True).astype(np.float64) / 127
    # A scale that is no normal number is itself rounded to a multiple of the smallest number.
    coarse = np.where(steps < 2.0**-126, 127 * 2.0**-149, 0)
    assert (np.abs(back - weight) <= 0.5001 * steps + coarse).all()
    assert (back[(weight == 0).all(axis=1)] == 0).all()


def test_int8_keeps_the_sign_of_numbers_that_are_nearly_nothing() -> None:
    weight = np.array([[697, -697]], np.float32) * np.float32(2.0**-149)  # the scale is 5 of 5.49
    back = unpacked(Packing("int8", 1, 2), pack_whole(Packing("int8", 1, 2), weight))
    assert back[0, 0] > 0 > back[0, 1]


@pytest.mark.parametrize("dtype", STORED)
def test_what_fills_the_last_panel_up_is_zero(dtype: str) -> None:
    whole = Packing(dtype, PANEL, 5)
    weight = random(PANEL, 5)
    weight[3:] = 0
    assert np.array_equal(pack_whole(Packing(dtype, 3, 5), weight[:3]), pack_whole(whole, weight))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
@PROPERTY
def test_rounding_to_bfloat16(values: list[float]) -> None:
    array = np.array(values, np.float32)
    back, expected = from_bfloat16(to_bfloat16(array)), round_to_bfloat16(array)
    assert np.array_equal(back, expected, equal_nan=True)
    assert np.array_equal(np.signbit(back), np.signbit(array))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # a tie, to the even number below
        (0x3F818000, 0x3F82),  # a tie, to the even number above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest number becomes infinite
        (0x80000001, 0x8000),
        (0x7F800001, 0x7FC0),  # a NaN whose upper bits alone would be infinite
    ],
)
def test_rounding_to_bfloat16_where_it_is_delicate(bits: int, rounded: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    assert to_bfloat16(value)[0] == rounded
    assert is_finite(to_bfloat16(value)) == np.isfinite(from_bfloat16(to_bfloat16(value))[0])


def test_rounding_is_the_one_of_others() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    with np.errstate(over="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).view(BITS)
    assert np.array_equal(to_bfloat16(values), theirs)
