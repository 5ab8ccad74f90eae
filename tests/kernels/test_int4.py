"""Weight quantisation: better than plain rounding, as good as ggml, exact where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser.backends.native.group_packing import GroupPacking
from glm_multiuser.backends.native.quantising import QUANTISED, SEARCHED, quantise
from tests.kernels.group_weights import DTYPES, HALVES, TYPES, GroupWeight
from tests.kernels.weights import pack_whole, zeros_of

pytestmark = pytest.mark.usefixtures("kernels")

GROUP = 32
SHAPE = (64, 1024)

OF_GGML = {
    "q4_k": {
        "normal": 0.13375,
        "uniform": 0.0260936,
        "on one side": 0.0074065,
        "outliers": 0.647886,
    },
    "q6_k": {
        "normal": 0.008297,
        "uniform": 0.0015913,
        "on one side": 0.0015726,
        "outliers": 0.049172,
    },
}
"""Squared errors of ggml's own quantiser on `samples` (ggml_quantize_chunk of llama-cpp-python
0.3.36)."""


def samples() -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    drawn = {
        "normal": generator.standard_normal(SHAPE),
        "uniform": generator.uniform(-1, 1, SHAPE),
        "on one side": generator.uniform(0.2, 1, SHAPE),
        "outliers": generator.standard_t(3, SHAPE),
    }
    return {name: (values * 0.02).astype(np.float32) for name, values in drawn.items()}


def as_float16(scales: NDArray[Any]) -> NDArray[np.float64]:
    return scales.astype(np.float16).astype(np.float64)


def rounded_plainly(groups: NDArray[np.float32]) -> NDArray[np.float64]:
    """The largest magnitude becomes 8, numbers are -8 to 7."""
    scales = as_float16(np.abs(groups).max(axis=1, keepdims=True) / 8)
    return np.clip(np.rint(groups / scales), -8, 7) * scales


def rounded_as_q4_0(groups: NDArray[np.float32]) -> NDArray[np.float64]:
    """The number with the largest magnitude becomes -8, as ggml does it."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], 1)
    scales = largest / -8
    return (np.minimum(15, np.floor(groups / scales + 8.5)) - 8) * as_float16(scales)


def rounded_as_q4_1(groups: NDArray[np.float32]) -> NDArray[np.float64]:
    """The smallest becomes 0 and the largest 15, as ggml does it."""
    low = groups.min(axis=1, keepdims=True)
    scales = (groups.max(axis=1, keepdims=True) - low) / 15
    numbers = np.minimum(15, np.floor((groups - low) / scales + 0.5))
    return numbers * as_float16(scales) + as_float16(low)


def values_of(dtype: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = TYPES[dtype].dequantise(blocks.reshape(-1, blocks.shape[-1]))
    return values


def squared_error(dtype: str, weight: NDArray[np.float32]) -> float:
    blocks, finite = quantise(dtype, weight)
    assert finite
    count = weight.shape[1] // TYPES[dtype].values
    assert blocks.shape == (len(weight), count, TYPES[dtype].bytes)
    return float(np.square(values_of(dtype, blocks).reshape(weight.shape) - weight).sum())


@pytest.mark.parametrize("name", samples())
def test_q4_1_is_nearer_than_other_ways(name: str) -> None:
    weight = samples()[name]
    groups = weight.reshape(-1, GROUP)
    for other in (rounded_plainly, rounded_as_q4_0, rounded_as_q4_1):
        error = np.square(other(groups) - groups).sum()
        assert squared_error("q4_1", weight) < 0.95 * error, other.__name__


@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize(("dtype", "part"), [("q4_k", 1.05), ("q6_k", 1.0)])
def test_it_is_as_near_as_ggml(dtype: str, part: float, name: str) -> None:
    assert squared_error(dtype, samples()[name]) < part * OF_GGML[dtype][name]


@pytest.mark.parametrize("dtype", SEARCHED)
def test_a_block_depends_on_its_own_inputs(dtype: str) -> None:
    weight = samples()["normal"]
    blocks, _ = quantise(dtype, weight)
    inputs = TYPES[dtype].values
    one, _ = quantise(dtype, np.ascontiguousarray(weight[9:10, inputs : 2 * inputs]))
    assert np.array_equal(blocks[9, 1], one[0, 0])


def test_what_q4_1_holds_comes_back() -> None:
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 16, (200, GROUP))
    numbers[:, 3], numbers[:, 5] = 0, 15
    minima, scales = generator.normal(0, 9, (200, 1)), generator.uniform(1e-3, 9, (200, 1))
    groups = (numbers * as_float16(scales) + as_float16(minima)).astype(np.float32)
    blocks, finite = quantise("q4_1", groups)
    assert finite
    assert np.array_equal(values_of("q4_1", blocks), groups)


@pytest.mark.parametrize("value", [0.0, 1e-12, -1e-30, 1e-44])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_too_small_is_zero(dtype: str, value: float) -> None:
    blocks, finite = quantise(dtype, np.full((2, 256), value, np.float32))
    assert finite
    assert (values_of(dtype, blocks) == 0).all()


@pytest.mark.parametrize("value", [1.0, -3.5, 0.25])
@pytest.mark.parametrize(("dtype", "tolerance"), [("q4_1", 0), ("q4_k", 2e-3), ("q6_k", 2e-3)])
def test_equal_numbers_stay_as_they_are(dtype: str, tolerance: float, value: float) -> None:
    """Up to the rounding of a block's float16 scale where it is multiplied once more."""
    blocks, finite = quantise(dtype, np.full((2, 256), value, np.float32))
    assert finite
    np.testing.assert_allclose(values_of(dtype, blocks), value, rtol=tolerance)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_what_is_out_of_range_is_noticed(dtype: str, value: float) -> None:
    weight = samples()["normal"]
    weight[33, 77] = value
    packing = GroupPacking(dtype, *weight.shape)
    assert not packing.pack_rows(weight, zeros_of(packing))
    weight[33, 77] = 1e5
    assert packing.pack_rows(weight, zeros_of(packing))


@pytest.mark.parametrize("dtype", QUANTISED)
def test_rows_are_quantised_and_packed(dtype: str) -> None:
    weight = samples()["normal"][:40]
    packing = GroupPacking(dtype, *weight.shape)
    packed = zeros_of(packing)
    assert packing.pack_rows(weight, packed)
    blocks, _ = quantise(dtype, weight)
    assert np.array_equal(packed, pack_whole(packing, blocks))
    with pytest.raises(ValueError, match="there are no int4 weights but those of files"):
        GroupPacking("int4", *weight.shape).pack_rows(weight, packed)
    half = weight.astype(np.float16)
    again = zeros_of(packing)
    assert packing.pack_rows(half, again)
    assert not np.array_equal(packed, again), "halves are other numbers"


@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6])
def test_q8_0_is_half_a_step_off_at_most(factor: float) -> None:
    for weight in samples().values():
        groups = weight.reshape(-1, 32) * np.float32(factor)
        groups[5] = 0
        blocks, finite = quantise("q8_0", groups)
        assert finite
        back = TYPES["q8_0"].dequantise(blocks.reshape(-1, 34))
        steps = np.abs(groups).max(axis=1, keepdims=True) / 127
        # A float16 scale is rounded, too.
        error = steps * (0.5 + 127 * 2.0**-11) + 128 * 2.0**-25
        assert (np.abs(back - groups) <= error).all()
    groups[3, 3] = 1e8
    assert not quantise("q8_0", groups)[1]


@pytest.mark.parametrize(("dtype", "at"), [(one, at) for one in DTYPES for at in HALVES[one]])
def test_a_scale_that_is_not_finite_is_noticed(dtype: str, at: int) -> None:
    weight = GroupWeight.random(dtype, 70, 2)
    assert weight.packing.pack_rows(weight.blocks, zeros_of(weight.packing))
    for bits in (0x7C00, 0xFC00, 0x7E01):
        blocks = weight.blocks.copy()
        blocks[69, 1, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
        assert not weight.packing.pack_rows(blocks, zeros_of(weight.packing))
