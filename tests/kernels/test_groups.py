"""Group-quantised weights give the same results as the same numbers in float32: the same bits, or
equal within float32 accuracy for tile products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm_multiuser.backends.native.group_packing import GROUP_TYPES, GroupPacking
from glm_multiuser.backends.native.packing import Packing
from tests.golden_data import golden_folder
from tests.kernels.calling import PROPERTY, bits, call, number, run
from tests.kernels.group_weights import DTYPES, TYPES, GroupWeight
from tests.kernels.memory import placed
from tests.kernels.test_linear import FACTOR, FINISHES, Exact, finished
from tests.kernels.test_packed_inputs import packed_inputs, run_packed
from tests.kernels.weights import EPSILON, SMALLEST_NORMAL, pack_whole, round_to_bfloat16, zeros_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

ROUNDED = "_bfloat16"

some_outputs = st.one_of(st.sampled_from([1, 31, 32, 33]), st.integers(1, 200))
some_seed = st.integers(0, 2**32 - 1)


@dataclasses.dataclass
class Product:
    """One call, and everything that goes into it."""

    finish: str
    x: NDArray[np.float32]
    weight: GroupWeight
    bias: NDArray[np.float32]
    residual: NDArray[np.float32]

    @staticmethod
    def random(
        finish: str, dtype: str, rows: int, blocks: int, outputs: int, seed: int = 0
    ) -> Product:
        generator = np.random.default_rng(seed)
        weight = GroupWeight.random(dtype, outputs, blocks, seed)
        shapes = (rows, weight.packing.inputs), (outputs,), (rows, outputs)
        x, bias, residual = [generator.standard_normal(one).astype(np.float32) for one in shapes]
        return Product(finish, x, weight, bias, residual)

    @functools.cached_property
    def packed(self) -> NDArray[Any]:
        return self.weight.packed()

    @property
    def packing(self) -> GroupPacking:
        return self.weight.packing

    def arguments(self, x: Any, residual: Any, used: int) -> list[NDArray[Any]]:
        arrays = [x, number(used), self.packed, self.bias]
        if "add" in self.finish:
            arrays += [residual, number(FACTOR, np.float32)]
        return arrays

    def run(self) -> NDArray[np.float32]:
        arguments = self.arguments(self.x, self.residual, len(self.x))
        return run(self.finish, *arguments, shape=self.residual.shape)

    def in_float32(self) -> NDArray[np.float32]:
        """With the same weights in float32."""
        wide = Packing("float32", self.packing.outputs, self.packing.inputs)
        product = dataclasses.replace(self)
        product.packed = pack_whole(wide, self.weight.values())
        return product.run()

    def exact(self) -> Exact:
        """A number and what is added to it may be far larger than their sum."""
        numbers, scales, minima = self.weight.numbers_and_scales()
        of_group = numbers.shape[1] // scales.shape[1]
        scaled = numbers * np.repeat(scales.astype(np.float64), of_group, axis=1)
        added = np.zeros_like(scales) if minima is None else minima
        added = np.repeat(added.astype(np.float64), of_group, axis=1)
        x = self.x.astype(np.float64)
        if self.finish.endswith(ROUNDED):
            x = round_to_bfloat16(self.x)
        y = x @ (scaled + added).T + self.bias
        sizes = np.abs(x) @ (np.abs(scaled) + np.abs(added)).T + np.abs(self.bias)
        error = 2 * EPSILON * (numbers.shape[1] + 8) * sizes
        # Tiles take numbers below the smallest normal one for nothing.
        largest = 1 + np.abs(scaled).max() + np.abs(scales).max()
        error += SMALLEST_NORMAL * numbers.shape[1] * (2 + np.abs(x).max() + largest)
        return finished(self.finish, y, error, self.residual)

    def rows(self, rows: Any) -> Product:
        return dataclasses.replace(self, x=self.x[rows], residual=self.residual[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ["", ROUNDED])
@given(
    finish=st.sampled_from(FINISHES),
    rows=st.one_of(st.integers(1, 40), st.integers(1, 200)),
    blocks=st.integers(1, 5),
    outputs=some_outputs,
    seed=some_seed,
    exponent=st.integers(-40, 30),
)
# Several panels to a piece.
@example(finish="linear", rows=1, blocks=3, outputs=1000, seed=0, exponent=0)
@example(finish="linear_add", rows=200, blocks=9, outputs=33, seed=0, exponent=-40)
@PROPERTY
def test_products_have_the_bits_of_float32(
    level: str,
    rounded: str,
    dtype: str,
    finish: str,
    rows: int,
    blocks: int,
    outputs: int,
    seed: int,
    exponent: int,
) -> None:
    """Sums that underflow, overflow, or are no numbers, too."""
    if level == "amx":
        pytest.skip("products are computed on tiles here; `test_products` says how exact")
    product = Product.random(finish + rounded, dtype, rows, blocks, outputs, seed)
    product.x = (product.x * np.float64(10.0**exponent)).astype(np.float32)
    assert bits(product.run()) == bits(product.in_float32())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ["", ROUNDED])
@given(
    finish=st.sampled_from(FINISHES),
    rows=st.one_of(st.integers(1, 40), st.integers(1, 200)),
    blocks=st.integers(1, 9),
    outputs=some_outputs,
    seed=some_seed,
    exponent=st.sampled_from([0, -40, -30, 20]),
)
@example(finish="linear_add", rows=300, blocks=28, outputs=33, seed=0, exponent=0)  # several passes
@PROPERTY
def test_products(
    rounded: str,
    dtype: str,
    finish: str,
    rows: int,
    blocks: int,
    outputs: int,
    seed: int,
    exponent: int,
) -> None:
    product = Product.random(finish + rounded, dtype, rows, blocks, outputs, seed)
    product.x = (product.x * np.float64(10.0**exponent)).astype(np.float32)
    expected, error = product.exact()
    assert (np.abs(product.run() - expected) <= error).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ["", ROUNDED])
def test_every_number_of_rows(dtype: str, rounded: str) -> None:
    """Each of them has the bits that it has in any other company."""
    product = Product.random("linear_add" + rounded, dtype, 40, 3, 70)
    all_rows = product.run()
    for rows in range(1, 40):
        first, last = product.rows(slice(rows)), product.rows(slice(40 - rows, None))
        assert bits(first.run()) == bits(all_rows[:rows])
        assert bits(last.run()) == bits(all_rows[40 - rows :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ["", ROUNDED])
@pytest.mark.parametrize("rows", [1, 4, 17, 70])
def test_swiglu_packs_its_results(dtype: str, rounded: str, rows: int) -> None:
    product = Product.random("linear_add" + rounded, dtype, rows, 2, 45)
    inputs = product.packing.inputs
    both = np.random.default_rng(2).standard_normal((rows, 2 * inputs)).astype(np.float32)
    product.x = run("swiglu", both, number(rows), shape=(rows, inputs))
    packed = packed_inputs("swiglu" + rounded, product, rows, both, number(rows), product.packed)
    assert bits(run_packed(product, packed)) == bits(product.run())


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.one_of(st.integers(2, 40), st.integers(129, 300)),  # threads divide many rows
    outputs=some_outputs,
    data=st.data(),
)
@PROPERTY
def test_what_the_others_hold_changes_nothing(
    dtype: str, rows: int, outputs: int, data: st.DataObject
) -> None:
    product = Product.random("linear_gelu", dtype, rows, 2, outputs)
    row = data.draw(st.integers(0, rows - 1), "row")
    alone = product.rows([row]).run()
    others = np.arange(rows) != row
    product.x[others] = data.draw(st.sampled_from([np.nan, np.inf, 3e38]), "what the others hold")
    assert bits(product.run()[row]) == bits(alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_what_is_not_finite_spoils_its_whole_row(dtype: str, rows: int) -> None:
    product = Product.random("linear", dtype, rows, 1, 40)
    product.x[0, 7] = np.nan
    y = product.run()
    assert not np.isfinite(y[0]).any()
    assert np.isfinite(y[1:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [0, 1, 6, 15])
def test_rows_behind_the_used_ones_are_not_read_and_not_written(dtype: str, used: int) -> None:
    product = Product.random("linear_add", dtype, 20, 1, 45)
    x = placed(product.x[:used], product.x.shape)
    residual = placed(product.residual[:used], product.residual.shape)
    output = np.full((20, 45), np.nan, np.float32)
    assert call(product.finish, *product.arguments(x, residual, used), output) == 0
    assert np.isnan(output[used:]).all()
    assert bits(output[:used]) == bits(product.rows(slice(used)).run())


def embedded(packing: GroupPacking, packed: Any, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    sizes = np.array([packing.outputs, packing.inputs], np.int32)
    shape = (len(ids), packing.inputs)
    return run("embedding", ids, number(len(ids)), packed, sizes, shape=shape)


@pytest.mark.parametrize("dtype", DTYPES)
@given(outputs=some_outputs, blocks=st.integers(1, 4), seed=some_seed)
@PROPERTY
def test_rows_of_an_embedding(dtype: str, outputs: int, blocks: int, seed: int) -> None:
    weight = GroupWeight.random(dtype, outputs, blocks, seed)
    ids = np.random.default_rng(seed).integers(0, outputs, 50, np.int32)
    found = embedded(weight.packing, weight.packed(), ids)
    assert bits(found) == bits(weight.values()[ids])


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.startswith("q")])
def test_values_are_those_of_ggml(dtype: str) -> None:
    with np.load(golden_folder("gguf_blocks") / "blocks.npz") as file:
        golden = {key: file[key] for key in file if key.startswith(f"{dtype.upper()}/")}
    kinds = {key.split("/")[1] for key in golden}
    assert kinds
    for kind in kinds:
        values = golden[f"{dtype.upper()}/{kind}/values"]
        blocks = golden[f"{dtype.upper()}/{kind}/bytes"]
        packing = GroupPacking(dtype, *values.shape)
        packed = pack_whole(packing, blocks.reshape(len(blocks), -1, TYPES[dtype].bytes))
        ids = np.arange(len(values), dtype=np.int32)
        assert bits(embedded(packing, packed, ids)) == bits(values), kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_a_weight(dtype: str) -> None:
    """No more than the file has, but for scales that are unpacked from 6 to 8 bits."""
    group = GROUP_TYPES[dtype]
    packing = GroupPacking(dtype, 64, 2 * group.inputs)
    more = 4 if dtype in ("q4_k", "q5_k") else 0
    assert zeros_of(packing).nbytes <= 64 * 2 * (TYPES[dtype].bytes + more)


FAULTS = ("bytes of a block", "blocks", "shape", "type")


@pytest.mark.parametrize(
    ("finish", "fault"),
    [("linear", "panels"), *((one, fault) for one in ("linear", "embedding") for fault in FAULTS)],
)
def test_refusals(finish: str, fault: str) -> None:
    packed = GroupWeight.random("q4_0", 40, 2).packed()
    wrong = {
        "bytes of a block": packed[:, :, 1:],
        "blocks": packed[:, :1],
        "panels": packed[:1],
        "shape": packed.reshape(len(packed), -1),
        "type": packed.astype(np.float64),
    }[fault]
    output = np.full((3, 40 if finish == "linear" else 64), 7, np.float32)
    inputs: list[NDArray[Any]] = [np.zeros((3, 64), np.float32), number(3), placed(wrong)]
    inputs.append(np.zeros(40, np.float32))
    if finish == "embedding":
        inputs[0], inputs[3] = np.zeros(3, np.int32), np.array([40, 64], np.int32)
    assert call(finish, *inputs, output) != 0
    assert (output == 7).all()
