"""The building blocks against the same formulas in numpy, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn

from glm_multiuser import device
from glm_multiuser.backends.portable.attention import Attention
from glm_multiuser.backends.portable.cells import PortableBackend, TanhGelu
from glm_multiuser.backends.protocol import AttentionShape
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.model_config import ChatGLM6BConfig
from glm_multiuser.models.batch import Rotary
from glm_multiuser.models.rotary import rotary_of, rotary_tables

RANDOM = np.random.default_rng(7)

BATCH: tuple[None] = (None,)
"""These cells are the same in every batch."""


def run(make: Any, *inputs: np.ndarray, batch: tuple[None, ...] = ()) -> np.ndarray:
    """Makes a cell and calls it, on the device thread."""

    def call() -> np.ndarray:
        device.configure("CPU", 0)
        cell: nn.Cell = make()
        return cell(*[Tensor(values) for values in inputs], *batch).asnumpy()

    return DEVICE_THREAD.call(call)


def test_tanh_gelu() -> None:
    # The tanh operator on CPU is off by 1e-4, GELU by the error function by 5e-4.
    x = np.linspace(-12, 12, 24001, dtype=np.float32)
    exact = x.astype(np.float64)
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    error = np.abs(run(TanhGelu, x) - 0.5 * exact * (1 + np.tanh(inner)))
    assert (error <= 1e-6 * np.maximum(1, np.abs(exact))).all(), error.max()


def test_tanh_gelu_far_out() -> None:
    x = np.array([-3e4, -1e3, -0.0, 0.0, 1e3, 3e4], np.float32)
    assert run(TanhGelu, x).tolist() == [0, 0, 0, 0, 1e3, 3e4]


def test_tanh_gelu_rounds_a_row_alike_whatever_the_others_hold() -> None:
    x = RANDOM.standard_normal((8, 256)).astype(np.float32)
    expected = run(TanhGelu, x)
    for value in (np.nan, np.inf, -np.inf, 1e9):
        spoilt = x.copy()
        spoilt[3] = value
        found = run(TanhGelu, spoilt)
        others = np.arange(8) != 3
        assert (found[others] == expected[others]).all()
        if np.isnan(value):
            assert np.isnan(found[3]).all()


@pytest.mark.parametrize("scale", [1e-3, 1, 1e4])
def test_layer_norm(scale: float) -> None:
    x = (RANDOM.standard_normal((5, 64)) * scale + 3 * scale).astype(np.float32)
    gamma, beta = RANDOM.standard_normal((2, 64)).astype(np.float32)

    def make() -> nn.Cell:
        cell = PortableBackend().layer_norm(64, 1e-5)
        cell.gamma.set_data(Tensor(gamma))
        cell.beta.set_data(Tensor(beta))
        return cell

    exact = x.astype(np.float64)
    centred = exact - exact.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gamma + beta
    assert np.abs(run(make, x, batch=BATCH) - expected).max() <= 2e-5


def test_layer_norm_of_half_precision_rows_is_computed_in_float32() -> None:
    # The squares of these values are beyond float16.
    x = (RANDOM.standard_normal((3, 64)) * 2000).astype(np.float16)
    found = run(lambda: PortableBackend.of("float16").layer_norm(64, 1e-5), x, batch=BATCH)
    assert found.dtype == np.float16
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(1, keepdims=True)) / exact.std(1, keepdims=True)
    assert np.abs(found - expected).max() <= 2e-3


@pytest.mark.parametrize("weight_first_rows", [0, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(has_bias: bool, weight_first_rows: int) -> None:
    x = RANDOM.standard_normal((5, 8)).astype(np.float32)
    weight = RANDOM.standard_normal((3, 8)).astype(np.float32)
    bias = RANDOM.standard_normal(3).astype(np.float32)

    def make() -> nn.Cell:
        cell = PortableBackend(weight_first_rows=weight_first_rows).linear(8, 3, has_bias)
        cell.weight.set_data(Tensor(weight))
        if has_bias:
            cell.bias.set_data(Tensor(bias))
        return cell

    expected = x.astype(np.float64) @ weight.T + bias * has_bias
    assert np.abs(run(make, x, batch=BATCH) - expected).max() <= 1e-5


def expected_tables(positions: int, dimensions: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Number by number, each rounded to `dtype` where the published model rounds."""
    kind = np.dtype(dtype).type
    half = dimensions // 2
    cosine, sine = np.zeros((2, positions, half))
    for column in range(half):
        inverse_frequency = float(np.float16(10000.0 ** (-2.0 * column / dimensions)))
        for position in range(positions):
            angle = float(kind(position * inverse_frequency))
            cosine[position, column] = kind(math.cos(angle))
            sine[position, column] = kind(math.sin(angle))
    return cosine, sine


@pytest.mark.parametrize(("dtype", "ulp"), [("float32", 2**-24), ("float16", 2**-11)])
@pytest.mark.parametrize("dimensions", [8, 64])
def test_rotary_tables(dtype: str, ulp: float, dimensions: int) -> None:
    cosine, sine = rotary_tables(600, dimensions, dtype)
    expected_cosine, expected_sine = expected_tables(600, dimensions, dtype)
    assert cosine.dtype == sine.dtype == np.float32
    for half, sign in ((slice(None, dimensions // 2), -1), (slice(dimensions // 2, None), 1)):
        assert np.abs(cosine[:, half] - expected_cosine).max() <= 2 * ulp
        assert np.abs(sine[:, half] - sign * expected_sine).max() <= 2 * ulp


def test_half_precision_tables_are_other_tables() -> None:
    single, half = (rotary_tables(600, 64, dtype)[0] for dtype in ("float32", "float16"))
    assert np.abs(single - half).max() > 1e-2
    assert (half.astype(np.float16) == half).all()


def test_rotary_embedding_turns_each_half_by_its_own_position() -> None:
    head_dim, heads = 16, 3
    x = RANDOM.standard_normal((4, heads, head_dim)).astype(np.float32)
    config = ChatGLM6BConfig(100, heads * head_dim, 1, heads, 64)
    rotary = rotary_of(config, "float32")
    cosine, sine = rotary.tables(10)
    position_ids = np.array([[0, 5, 3, 3], [0, 0, 1, 9]], np.int32)

    class Rotate(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            shape = AttentionShape(heads, heads, head_dim)
            self.attention = Attention(shape, "float32", "float32")
            self.partners = Tensor(rotary.partners)

        def construct(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
            tables: Rotary = {"cosine": cosine, "sine": sine, "partners": self.partners}
            return self.attention.rotate(x, tables)

    def rows(table: np.ndarray) -> np.ndarray:
        """For each token the row of each half's own position."""
        return np.concatenate([table[part] for part in position_ids], 1)[:, None, :]

    found = run(Rotate, x.reshape(4, -1), rows(cosine), rows(sine))
    # A pair of numbers that is one quarter of the head apart is a complex number.
    quarter = head_dim // 4
    frequency = (10000.0 ** (-np.arange(quarter) / quarter)).astype(np.float16).astype(float)
    for part in range(2):
        first = 2 * part * quarter
        real = slice(first, first + quarter)
        imaginary = slice(first + quarter, first + 2 * quarter)
        turn = np.exp(1j * position_ids[part][:, None] * frequency)[:, None, :]
        turned = (x[:, :, real] + 1j * x[:, :, imaginary]) * turn
        assert np.abs(found[:, :, real] - turned.real).max() <= 1e-6
        assert np.abs(found[:, :, imaginary] - turned.imag).max() <= 1e-6
