"""Row-wise operators: embedding, norms, SwiGLU, the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm_multiuser.backends.native.packing import STORED, Packing
from tests.kernels.calling import PROPERTY, bits, call, number, run
from tests.kernels.memory import placed
from tests.kernels.weights import EPSILON, pack_whole, unpacked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

some_rows = st.one_of(st.integers(1, 5), st.integers(1, 300))
some_size = st.one_of(st.sampled_from([1, 3, 4, 7, 8, 15, 16, 17, 128]), st.integers(1, 600))
some_seed = st.integers(0, 2**32 - 1)


def normal(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return generator.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", STORED)
@given(st.integers(1, 100), some_size, some_rows, some_seed)
@PROPERTY
def test_embedding(dtype: str, vocabulary: int, width: int, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    packing = Packing(dtype, vocabulary, width)
    packed = pack_whole(packing, normal(generator, vocabulary, width))
    ids = generator.integers(0, vocabulary, rows).astype(np.int32)
    sizes = np.array([vocabulary, width], np.int32)
    y = run("embedding", ids, number(rows), packed, sizes, shape=(rows, width))
    assert np.array_equal(y, unpacked(packing, packed).astype(np.float32)[ids])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_embedding_of_16_bits_has_the_bits_of_float32(dtype: str) -> None:
    """Every number that there is: subnormal ones, both zeros, infinity."""
    stored = np.arange(1 << 16, dtype=np.uint16)
    stored = stored[(stored & 0x7FFF) <= (0x7C00 if dtype == "float16" else 0x7F80)]
    packing = Packing(dtype, len(stored), 1)
    packed = pack_whole(packing, stored.view(packing.unpacked_dtype)[:, None])
    ids, sizes = np.arange(len(stored), dtype=np.int32), np.array([len(stored), 1], np.int32)
    y = run("embedding", ids, number(len(ids)), packed, sizes, shape=(len(ids), 1))
    assert bits(y) == bits(unpacked(packing, packed).astype(np.float32))


@pytest.mark.parametrize("wrong", [-1, 40, 41, 2**31 - 1, -(2**31)])
def test_embedding_refuses_ids_that_are_none(wrong: int) -> None:
    packed = pack_whole(Packing("float32", 40, 8), np.ones((40, 8), np.float32))
    ids, sizes = np.array([3, wrong, 39], np.int32), np.array([40, 8], np.int32)
    output = np.full((3, 8), 7, np.float32)
    assert call("embedding", ids, number(3), packed, sizes, output) != 0
    assert (output == 7).all()
    assert call("embedding", ids, number(1), packed, sizes, output) == 0, "it is behind the used"
    assert (output[0] == 1).all()
    assert (output[1:] == 7).all()


def test_embedding_refuses_other_types_of_weights() -> None:
    packed = pack_whole(Packing("float32", 40, 8), np.ones((40, 8), np.float32)).astype(np.float64)
    ids, sizes = np.zeros(1, np.int32), np.array([40, 8], np.int32)
    output = np.full((1, 8), 7, np.float32)
    assert call("embedding", ids, number(1), packed, sizes, output) != 0
    assert (output == 7).all()


some_scale = st.integers(-18, 15).map(lambda exponent: np.float64(10.0**exponent))
some_middle = st.sampled_from([0.0, 1.0, -30.0])


@given(some_rows, some_size, some_seed, some_scale, some_middle)
@PROPERTY
def test_layer_norm(rows: int, size: int, seed: int, scale: np.float64, middle: float) -> None:
    generator = np.random.default_rng(seed)
    x = ((normal(generator, rows, size) + middle) * scale).astype(np.float32)
    gamma, beta, epsilon = normal(generator, size), normal(generator, size), float(np.float32(1e-5))
    y = run("layer_norm", x, number(rows), gamma, beta, number(epsilon, np.float32), shape=x.shape)
    exact = x.astype(np.float64)
    difference = exact - exact.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((difference**2).mean(axis=1, keepdims=True) + epsilon)
    expected = difference * factor * gamma + beta
    off = EPSILON * (size + 16) * np.abs(exact).max(axis=1, keepdims=True) * factor + 8 * EPSILON
    error = (1 + np.abs(difference * factor)) ** 2 * np.abs(gamma) * 4 * off
    assert (np.abs(y - expected) <= error + 4 * EPSILON * np.abs(beta)).all()


@given(some_rows, some_size, some_seed, some_scale)
@PROPERTY
def test_rms_norm(rows: int, size: int, seed: int, scale: np.float64) -> None:
    generator = np.random.default_rng(seed)
    x = (normal(generator, rows, size) * scale).astype(np.float32)
    weight, epsilon = normal(generator, size), float(np.float32(1e-6))
    y = run("rms_norm", x, number(rows), weight, number(epsilon, np.float32), shape=x.shape)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + epsilon) * weight
    assert (np.abs(y - expected) <= EPSILON * (size + 16) * np.abs(expected) + 1e-37).all()


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@given(some_rows, some_size, some_seed)
@PROPERTY
def test_norms_add_a_residual(name: str, rows: int, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, residual = normal(generator, rows, size), normal(generator, rows, size)
    vectors = [normal(generator, size) for _ in range(2 if name == "layer_norm" else 1)]
    inputs = x, number(rows), *vectors, number(1e-5, np.float32)
    y = run(name, *inputs, shape=x.shape)
    assert bits(run(name, *inputs, residual, shape=x.shape)) == bits(y + residual)


some_heads = st.integers(1, 6)


@given(some_heads, some_heads, some_size, st.integers(0, 70), some_rows, some_seed, some_scale)
@PROPERTY
def test_query_key_norm(
    heads: int, kv_heads: int, head_dim: int, rest: int, rows: int, seed: int, scale: np.float64
) -> None:
    generator = np.random.default_rng(seed)
    normed = (heads + kv_heads) * head_dim
    x = (normal(generator, rows, normed + rest) * scale).astype(np.float32)
    query_weight, key_weight = normal(generator, head_dim), normal(generator, head_dim)
    epsilon = float(np.float32(1e-6))
    y = run(
        "query_key_norm",
        x,
        number(rows),
        query_weight,
        key_weight,
        number(epsilon, np.float32),
        np.array([heads, kv_heads], np.int32),
        shape=x.shape,
    )
    assert bits(y[:, normed:]) == bits(x[:, normed:])
    exact = x[:, :normed].reshape(rows, -1, head_dim).astype(np.float64)
    weights = np.stack([query_weight] * heads + [key_weight] * kv_heads)
    expected = exact / np.sqrt((exact**2).mean(axis=2, keepdims=True) + epsilon) * weights
    error = EPSILON * (head_dim + 16) * np.abs(expected) + 1e-37
    assert (np.abs(y[:, :normed].reshape(expected.shape) - expected) <= error).all()


@pytest.mark.parametrize("heads", [(0, 1), (1, 0), (-1, 3), (3, 2)])
def test_query_key_norm_refuses_heads_that_are_not_there(heads: tuple[int, int]) -> None:
    x, weight = np.ones((2, 16), np.float32), np.ones(4, np.float32)
    output = np.full((2, 16), 7, np.float32)
    inputs = x, number(2), weight, weight, EPSILONS, np.array(heads, np.int32)
    assert call("query_key_norm", *inputs, output) != 0
    assert (output == 7).all()


@given(some_rows, some_size, some_seed, st.integers(-40, 18))
@PROPERTY
def test_swiglu(rows: int, size: int, seed: int, exponent: int) -> None:
    generator = np.random.default_rng(seed)
    both = (normal(generator, rows, 2 * size) * np.float64(10.0**exponent)).astype(np.float32)
    gate, up = both[:, :size], both[:, size:]
    y = run("swiglu", both, number(rows), shape=(rows, size))
    exact = gate.astype(np.float64)
    expected = exact / (1 + np.exp(-np.clip(exact, -700, 700))) * up
    # The exponential is as wrong as the exponent is large, and never less than 2^-128. What is
    # smaller than a normal number may be 0: libraries that this process loads can ask for that.
    relative = EPSILON * (16 + 4 * np.minimum(np.abs(exact), 90))
    error = np.abs(expected) * relative + np.abs(exact * up) * 2.0**-126 + 2.0**-126
    assert (np.abs(y - expected) <= error).all()


@given(st.integers(1, 600), st.integers(1, 20), some_seed, st.data())
@PROPERTY
def test_next_token_is_the_first_of_the_best(
    vocabulary: int, rows: int, seed: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(seed)
    different = data.draw(st.sampled_from([1, 2, 5, 1000]), "different logits")
    logits = generator.integers(-different, different, (rows, vocabulary)).astype(np.float32)
    logits[:, 1:][generator.random((rows, vocabulary - 1)) < 0.3] = -np.inf
    best, finite = next_token(normal(generator, rows, 9), logits)
    assert best.tolist() == logits.argmax(axis=1).tolist()
    assert (finite == 0).all()


@given(st.integers(1, 70), st.data())
@PROPERTY
def test_next_token_tells_what_is_not_finite(width: int, data: st.DataObject) -> None:
    hidden, logits = np.ones((3, width), np.float32), np.zeros((3, 40), np.float32)
    bad = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    hidden[1, data.draw(st.integers(0, width - 1))] = bad
    _, finite = next_token(hidden, logits)
    assert np.isnan(finite).tolist() == [False, True, False]


@pytest.mark.parametrize("logit", [np.nan, np.inf, -np.inf])
def test_next_token_tells_that_the_best_logit_is_not_finite(logit: float) -> None:
    logits = np.full((3, 40), 1, np.float32)
    logits[1] = logit
    best, finite = next_token(np.ones((3, 9), np.float32), logits)
    assert best.tolist() == [0, 0, 0]
    assert np.isnan(finite).tolist() == [False, True, False]


def next_token(hidden: Any, logits: Any) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    rows = len(hidden)
    best, finite = placed(np.full(rows, -1, np.int32)), placed(np.full(rows, 7, np.float32))
    inputs = placed(hidden), placed(logits), number(rows)
    assert call("next_token", *inputs, best, finite) == 0
    return best, finite


ONES, EPSILONS = np.ones(20, np.float32), number(1e-5, np.float32)
HEADS = np.array([2, 1], np.int32)

INPUTS: dict[str, Any] = {
    "layer_norm": lambda x, used: (x, used, ONES, ONES, EPSILONS),
    "layer_norm, residual": lambda x, used: (x, used, ONES, ONES, EPSILONS, x),
    "rms_norm": lambda x, used: (x, used, ONES, EPSILONS),
    "rms_norm, residual": lambda x, used: (x, used, ONES, EPSILONS, x),
    "query_key_norm": lambda x, used: (x, used, ONES[:4], ONES[:4], EPSILONS, HEADS),
    "swiglu": lambda x, used: (x, used),
}
"""Operator, and perhaps which form of it -> its inputs."""


def operator_of(name: str) -> str:
    return name.split(",")[0]


def width_of(name: str) -> int:
    """Columns that an operator makes of 20."""
    return 10 if name == "swiglu" else 20


@pytest.mark.parametrize("name", INPUTS)
@given(st.integers(1, 900), st.integers(-3, 1000), some_seed)
@PROPERTY
def test_only_used_rows_are_read_and_written(name: str, rows: int, used: int, seed: int) -> None:
    x = normal(np.random.default_rng(seed), rows, 20)
    there, width = min(max(used, 0), rows), width_of(name)
    output = np.full((rows, width), np.nan, np.float32)
    inputs = INPUTS[name](placed(x[:there], x.shape), number(used))
    assert call(operator_of(name), *inputs, output) == 0
    assert np.isnan(output[there:]).all()
    for row in {0, there // 2, there - 1} if there else ():
        one = INPUTS[name](x[row : row + 1], number(1))
        alone = run(operator_of(name), *one, shape=(1, width))
        assert bits(output[row]) == bits(alone)


def test_next_token_reads_and_writes_used_rows_only() -> None:
    hidden = placed(np.ones((2, 9), np.float32), (5, 9))
    logits = placed(np.ones((2, 40), np.float32), (5, 40))
    best, finite = np.full(5, -1, np.int32), np.full(5, 7, np.float32)
    assert call("next_token", hidden, logits, number(2), best, finite) == 0
    assert best.tolist() == [0, 0, -1, -1, -1]
    assert finite.tolist() == [0, 0, 7, 7, 7]


def test_embedding_reads_and_writes_used_rows_only() -> None:
    packed = pack_whole(Packing("float32", 40, 8), np.ones((40, 8), np.float32))
    ids, sizes = placed(np.zeros(2, np.int32), (5,)), np.array([40, 8], np.int32)
    output = np.full((5, 8), 7, np.float32)
    assert call("embedding", ids, number(2), packed, sizes, output) == 0
    assert output[:, 0].tolist() == [1, 1, 7, 7, 7]


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_stays_in_its_row(name: str, bad: float) -> None:
    x = normal(np.random.default_rng(0), 9, 20)
    shape = (9, width_of(name))
    expected = run(operator_of(name), *INPUTS[name](x, number(9)), shape=shape)
    x[4, 7] = bad
    y = run(operator_of(name), *INPUTS[name](x, number(9)), shape=shape)
    others = np.arange(9) != 4
    assert bits(y[others]) == bits(expected[others])
    if not np.isfinite(bad):
        assert not np.isfinite(y[4]).all()
