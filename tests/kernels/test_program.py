"""Programs give the same bits as their kernels called one by one."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from glm_multiuser.backends.native import library, operators
from glm_multiuser.backends.native.packing import Packing
from glm_multiuser.backends.native.program import CapturedProgram, Program, Value
from glm_multiuser.errors import ConfigError, GLMMultiUserError
from tests.kernels.calling import PROPERTY, bits, call, native, number, run
from tests.kernels.memory import placed
from tests.kernels.weights import pack_whole

pytestmark = pytest.mark.usefixtures("level")

ROWS, HIDDEN, INNER, VOCABULARY = 5, 24, 40, 50
FEW = np.array([1e-5], np.float32)


class Stored:
    """In place of a Parameter."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = placed(array)
        self.shape = array.shape


def carry_out(
    program: Program, results: list[Value], numbers: NDArray[np.int32]
) -> list[NDArray[Any]]:
    """-> what the operator returns; what it does not write stays NaN, or -1."""
    code = placed(program.code(results))
    outputs = [
        placed(np.full(one.shape, np.nan if one.dtype == "float32" else -1, one.dtype))
        for one in results
    ]
    arguments = [one.array for one in program.parameters]
    refused = call("run_program", code, placed(numbers), *arguments, *outputs)
    assert refused == 0, f"a kernel refused in line {refused} of its source"
    return outputs


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(seed: int, outputs: int, inputs: int) -> NDArray[Any]:
    packing = Packing("float32", outputs, inputs)
    return pack_whole(packing, normal(seed, outputs, inputs))


TABLE, GATE_UP, DOWN = (
    packed(0, VOCABULARY, HIDDEN),
    packed(1, 2 * INNER, HIDDEN),
    packed(2, HIDDEN, INNER),
)
WEIGHT, BIAS = normal(3, HIDDEN), normal(4, HIDDEN)
SIZES = np.array([VOCABULARY, HIDDEN], np.int32)
NO_BIAS, NO_LOGIT_BIAS = np.zeros(2 * INNER, np.float32), np.zeros(VOCABULARY, np.float32)


def mlp_program() -> tuple[Program, list[Value]]:
    """An embedding, an MLP with its norm, and the next tokens of some rows, with tied weights."""
    program = Program()
    ids, used = program.step_inputs(ROWS), program.step_inputs(1)
    answered, answered_used = program.step_inputs(2), program.step_inputs(1)
    table, gate_up, down, weight, bias = map(Stored, (TABLE, GATE_UP, DOWN, WEIGHT, BIAS))
    hidden = operators.embedding(HIDDEN)(ids, used, table, SIZES)
    x = operators.rms_norm(hidden, used, weight, FEW)
    row_bytes = library.row_bytes("float32", DOWN.shape, INNER, "float32", native())
    gated = operators.linear("linear")(x, used, gate_up, NO_BIAS)
    x = operators.swiglu("swiglu", row_bytes)(gated, used, down)
    hidden = operators.linear("linear_add")(x, used, down, bias, hidden, np.ones(1, np.float32))
    rows = operators.take_rows(hidden, answered, answered_used)
    logits = operators.linear("linear")(rows, answered_used, table, NO_LOGIT_BIAS)
    tokens, finite = operators.next_token(rows, logits, answered_used)
    return program, [tokens, finite, logits]


def mlp_one_by_one(ids: NDArray[np.int32], used: int, answered: list[int]) -> NDArray[np.float32]:
    """-> logits of the answered rows."""
    rows = number(used)
    hidden = run("embedding", ids, rows, TABLE, SIZES, shape=(ROWS, HIDDEN))
    x = run("rms_norm", hidden, rows, WEIGHT, FEW, shape=(ROWS, HIDDEN))
    x = run("linear", x, rows, GATE_UP, NO_BIAS, shape=(ROWS, 2 * INNER))
    x = run("swiglu", x, rows, shape=(ROWS, INNER))
    one = number(1, np.float32)
    hidden = run("linear_add", x, rows, DOWN, BIAS, hidden, one, shape=(ROWS, HIDDEN))
    taken = hidden[answered]
    all_of_them = number(len(answered))
    return run(
        "linear", taken, all_of_them, TABLE, NO_LOGIT_BIAS, shape=(len(answered), VOCABULARY)
    )


@pytest.mark.parametrize(("used", "answered"), [(5, [4, 0]), (5, [2]), (3, [2, 2]), (1, [0])])
def test_a_program_has_the_bits_of_its_kernels(used: int, answered: list[int]) -> None:
    program, results = mlp_program()
    assert len(program.parameters) == 5, "the tied weight is one of them, once"
    ids = np.array([7, 0, 49, 31, 8], np.int32)
    asked = [*answered, *[-5] * (2 - len(answered))]  # what is behind the used is not looked at
    numbers = np.array([*ids, used, *asked, len(answered)], np.int32)
    tokens, finite, logits = carry_out(program, results, numbers)
    expected = mlp_one_by_one(ids, used, answered)
    count = len(answered)
    assert bits(logits[:count]) == bits(expected)
    assert tokens.tolist() == [*expected.argmax(axis=1), *[-1] * (2 - count)]
    assert finite[:count].tolist() == [0.0] * count
    assert np.isnan(logits[count:]).all()


@pytest.mark.parametrize("wrong", [{0: 50}, {1: -1}, {6: 5}, {7: -1}])
def test_what_a_kernel_refuses_the_program_refuses(wrong: dict[int, int]) -> None:
    program, results = mlp_program()
    numbers = np.array([7, 0, 49, 31, 8, 5, 4, 0, 2], np.int32)
    for place, value in wrong.items():
        numbers[place] = value
    outputs = [np.full(one.shape, 7, one.dtype) for one in results]
    code, arguments = program.code(results), [one.array for one in program.parameters]
    assert call("run_program", code, numbers, *arguments, *outputs) != 0
    assert all((output == 7).all() for output in outputs)


@pytest.fixture
def same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures what `call` launches, in whatever library it is."""
    opened = native()
    opened.glm_capture.restype = ctypes.c_void_p
    opened.glm_replay.argtypes = opened.glm_forget.argtypes = [ctypes.c_void_p]
    monkeypatch.setattr(library, "open_library", lambda: opened)


@pytest.mark.usefixtures("same_library")
def test_a_launch_is_replayed_with_what_its_memory_holds_then() -> None:
    program, results = mlp_program()
    code, arguments = program.code(results), [one.array for one in program.parameters]
    numbers = np.array([7, 0, 49, 31, 8, 5, 4, 0, 2], np.int32)
    outputs = [placed(np.zeros(one.shape, one.dtype)) for one in results]
    assert call("run_program", code, numbers, *arguments, *outputs) == 0
    captured = CapturedProgram()
    # Other launches, of which one is captured, change nothing.
    carry_out(program, results, np.array([3, 3, 3, 3, 3, 5, 1, 2, 2], np.int32))
    other = CapturedProgram()
    del other
    ids = np.array([1, 2, 3, 4, 5], np.int32)
    numbers[:] = [*ids, 5, 0, 3, 2]
    captured.replay()
    assert bits(outputs[2]) == bits(mlp_one_by_one(ids, 5, [0, 3]))
    numbers[0] = VOCABULARY
    with pytest.raises(GLMMultiUserError, match=r"a kernel refused, in line \d+ of its source"):
        captured.replay()


@pytest.mark.usefixtures("same_library")
def test_a_launch_is_captured_once() -> None:
    program, results = mlp_program()
    carry_out(program, results, np.array([7, 0, 49, 31, 8, 5, 4, 0, 2], np.int32))
    CapturedProgram()
    with pytest.raises(GLMMultiUserError, match="MindSpore has not launched"):
        CapturedProgram()


def test_callers_wait_for_each_other() -> None:
    program, results = mlp_program()
    code, arguments = program.code(results), [one.array for one in program.parameters]

    def ask(token: int) -> bytes:
        numbers = np.array([token, 0, 0, 0, 0, 1, 0, 0, 1], np.int32)
        outputs = [np.full(one.shape, 0, one.dtype) for one in results]
        assert call("run_program", code, numbers, *arguments, *outputs) == 0
        return bits(outputs[2])

    expected = [ask(token) for token in range(VOCABULARY)]
    with ThreadPoolExecutor(4) as callers:
        assert list(callers.map(ask, [*range(VOCABULARY)] * 4)) == expected * 4


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(size, which earlier value, which of that size is added) of each."""
    place = st.integers(0, 2**30)
    return draw(st.lists(st.tuples(st.integers(0, 2), place, place), min_size=1, max_size=30))


SIZES_DRAWN = (3, 17, 40)
WIDER = {size: packed(size, size, 40) for size in SIZES_DRAWN}
NARROW = {size: packed(100 + size, 40, size) for size in SIZES_DRAWN}


@given(steps())
@PROPERTY
def test_values_keep_what_they_hold_until_it_is_read(drawn: list[tuple[int, int, int]]) -> None:
    """Each takes an earlier value, however old, as another one is added to a product of it."""
    program = Program()
    ids, used = program.step_inputs(2), program.step_inputs(1)
    table = packed(9, VOCABULARY, 40)
    rows, sizes = np.array([3, 11], np.int32), np.array([VOCABULARY, 40], np.int32)
    values = [operators.embedding(40)(ids, used, Stored(table), sizes)]
    arrays = [run("embedding", rows, number(2), table, sizes, shape=(2, 40))]
    for which, earlier, added in drawn:
        size = SIZES_DRAWN[which]
        source = earlier % len(values)
        width = values[source].shape[1]
        weight = WIDER[size] if width == 40 else NARROW[width]
        size = size if width == 40 else 40
        bias, factor = np.zeros(size, np.float32), np.full(1, 0.5, np.float32)
        same = [place for place, value in enumerate(values) if value.shape[1] == size]
        inputs: list[Any] = [weight, bias]
        if same:
            other = same[added % len(same)]
            found = operators.linear("linear_add")(
                values[source], used, Stored(weight), bias, values[other], factor
            )
            inputs += [arrays[other], factor]
        else:
            found = operators.linear("linear")(values[source], used, Stored(weight), bias)
        values.append(found)
        name = "linear_add" if same else "linear"
        arrays.append(run(name, arrays[source], number(2), *inputs, shape=(2, size)))
    numbers = np.array([*rows, 2], np.int32)
    (result,) = carry_out(program, [values[-1]], numbers)
    assert bits(result) == bits(arrays[-1])


def test_memory_is_used_again() -> None:
    program = Program()
    used = program.step_inputs(1)
    x = operators.take_rows(Value(program, (8, 64), "float32"), program.step_inputs(8), used)
    before = program.code([])[2]
    for _ in range(100):
        x = operators.rms_norm(x, used, WEIGHT, FEW)
    assert program.code([])[2] <= before + 8 * 64


def test_a_kernel_that_there_is_not() -> None:
    program = Program()
    with pytest.raises(KeyError, match="no kernel 'run_program'"):
        program.add("run_program", [program.step_inputs(1)], [])


def test_a_step_that_takes_more_memory_than_offsets_reach() -> None:
    program = Program()
    used, weight = program.step_inputs(1), np.ones(1100, np.float32)
    table = Value(program, (8, 1100), "float32")
    x = operators.take_rows(table, program.step_inputs(1 << 20), used)
    norm = operators.rms_norm(x, used, weight, FEW)
    result = operators.rms_norm(norm, used, weight, FEW)
    with pytest.raises(ConfigError, match=r"8,800 MiB.*at most 8,191: prefill_chunk is too large"):
        program.code([result])
