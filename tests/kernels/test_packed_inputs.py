"""Inputs packed by an operator for the next product, which gives the same bits as with float32
inputs."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from glm_multiuser.backends.native import library
from tests.kernels.calling import bits, call, native, number, run
from tests.kernels.memory import placed
from tests.kernels.test_linear import INPUTS, KINDS, Product

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("level")]

SHAPES = ((1, 40, 33), (3, 64, 32), (17, 33, 100), (70, 1057, 65), (300, 31, 130))
"""Rows, inputs of the first product, and of the second."""


def rounding(kind: str) -> str:
    """Of x, as kernels are called."""
    return f"_{kind.split(INPUTS)[1]}" if INPUTS in kind else ""


class NextProduct(Protocol):
    """A product that takes packed inputs."""

    finish: str
    residual: NDArray[np.float32]

    @property
    def packed(self) -> NDArray[Any]: ...

    @property
    def packing(self) -> Any: ...

    def arguments(self, x: Any, residual: Any, used: int) -> list[NDArray[Any]]: ...


def next_product(kind: str, rows: int, inputs: int) -> Product:
    return Product.random("linear_add", kind, rows, inputs, 45, seed=1)


def packed_inputs(name: str, product: NextProduct, rows: int, *inputs: Any) -> NDArray[np.uint8]:
    """The inputs [rows, inputs] that an operator packs for a product. Their memory is larger than
    their shape says."""
    dtype, shape = str(product.packed.dtype), product.packed.shape
    rounded_to = product.finish.removeprefix("linear_add").removeprefix("_") or "float32"
    columns = product.packing.inputs
    row_bytes = library.row_bytes(dtype, shape, columns, rounded_to, native())
    multiple = library.row_multiple()
    whole = -(-rows // multiple) * multiple
    memory = placed(np.full(max(whole * row_bytes, rows * columns), 0xFF, np.uint8))
    output = memory[: rows * columns].reshape(rows, columns)
    assert call(name, *[placed(each) for each in inputs], output) == 0
    return output


def run_packed(product: NextProduct, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    # As it is: a copy would have no more than its shape says.
    y = placed(np.full(product.residual.shape, np.nan, np.float32))
    arguments = product.arguments(rows, product.residual, len(rows))
    assert call(product.finish, *arguments, y) == 0
    return y


@pytest.mark.parametrize(("rows", "inputs", "inner"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_packs_its_results(kind: str, rows: int, inputs: int, inner: int) -> None:
    first = Product.random("linear_gelu", kind, rows, inputs, inner)
    second = next_product(kind, rows, inner)
    second.x = first.run()
    arguments = first.arguments(first.x, first.residual, rows)
    packed = packed_inputs(first.finish, second, rows, *arguments, second.packed)
    assert bits(run_packed(second, packed)) == bits(second.run())


@pytest.mark.parametrize("other", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("inputs", ["", "_bfloat16", "_int8"])
def test_for_weights_of_another_type(kind: str, other: str, inputs: str) -> None:
    first, second = Product.random("linear_gelu", kind, 40, 70, 65), next_product(other, 40, 65)
    first.finish += inputs
    second.finish += inputs
    second.x = first.run()
    arguments = first.arguments(first.x, first.residual, 40)
    packed = packed_inputs(first.finish, second, 40, *arguments, second.packed)
    assert bits(run_packed(second, packed)) == bits(second.run())


@pytest.mark.parametrize("rows", [1, 4, 17, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_packs_its_results(kind: str, rows: int) -> None:
    second = next_product(kind, rows, 77)
    both = np.random.default_rng(2).standard_normal((rows, 154)).astype(np.float32)
    second.x = run("swiglu", both, number(rows), shape=(rows, 77))
    packed = packed_inputs(
        "swiglu" + rounding(kind), second, rows, both, number(rows), second.packed
    )
    assert bits(run_packed(second, packed)) == bits(second.run())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_bits_that_they_have_alone(kind: str) -> None:
    first, second = Product.random("linear_gelu", kind, 70, 40, 65), next_product(kind, 70, 65)

    def answers(rows: Any) -> NDArray[np.float32]:
        one, two = first.rows(rows), second.rows(rows)
        arguments = one.arguments(one.x, one.residual, len(one.x))
        packed = packed_inputs(one.finish, two, len(one.x), *arguments, two.packed)
        return run_packed(two, packed)

    together = answers(slice(None))
    for row in (0, 15, 16, 33, 69):
        assert bits(answers([row])) == bits(together[[row]])


def test_what_is_not_finite_stays_in_its_row() -> None:
    kind = f"bfloat16{INPUTS}bfloat16"
    first, second = Product.random("linear_gelu", kind, 40, 64, 65), next_product(kind, 40, 65)

    def answers() -> NDArray[np.float32]:
        arguments = first.arguments(first.x, first.residual, 40)
        return run_packed(
            second, packed_inputs(first.finish, second, 40, *arguments, second.packed)
        )

    healthy = answers()
    first.x[7] = np.nan
    spoiled = answers()
    assert np.isnan(spoiled[7]).all()
    others = np.arange(40) != 7
    assert bits(spoiled[others]) == bits(healthy[others])


def test_a_weight_of_other_inputs_is_refused() -> None:
    first, second = Product.random("linear_gelu", "bfloat16", 2, 8, 64), next_product("int8", 2, 96)
    arguments = [placed(each) for each in first.arguments(first.x, first.residual, 2)]
    output = placed(np.zeros((2, 64), np.uint8))
    assert call("linear_gelu", *arguments, second.packed, output) != 0
    assert call("linear", *arguments, output) != 0
    with pytest.raises(ValueError, match="no product takes 64 float32 inputs of a int8"):
        library.row_bytes("int8", second.packed.shape, 64, "float32", native())
