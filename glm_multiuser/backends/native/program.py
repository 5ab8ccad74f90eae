"""A step as one operator: cells say what it computes, and the library computes it.

Native cells compute nothing themselves. They are called once, outside of MindSpore's graphs, with
`Value`s in place of tensors, and each adds an instruction to a program. The operator `run_program`
(`cpu/program.cpp`) carries out the whole program. All that it needs is an argument that stays where
it is, so one launch by MindSpore's graph can be captured, and replayed in every step.

    code         words: how many values and instructions there are, and how many words of the
                 library's memory; then the values, the instructions, the constants
    value        place, first word there, dtype (of `DTYPES`), rank, shape. The place is an argument
                 of the operator, by its number, or `MEMORY`
    instruction  number of the kernel, how many operands it has, the operands: inputs, then outputs.
                 An operand is an argument of the operator, by its number, or, below zero, a value:
                 -1 the first, -2 the second

A word is four bytes. Arguments are the code, the numbers of the step, Parameters, and the results.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native import library
from glm_multiuser.errors import GLMMultiUserError

Shape = tuple[int, ...]

DTYPES = ("int32", "float32", "uint8")
MEMORY, CODE, NUMBERS, PARAMETERS = -1, 0, 1, 2
"""Places of values; the first Parameter's is `PARAMETERS`."""

LINE = 16
"""Words of a cache line, where every value in the library's memory begins."""


@dataclass(eq=False)
class Value:
    """A tensor of the step that is recorded."""

    program: Program
    shape: Shape
    dtype: str
    place: int = MEMORY
    first: int = 0
    """Word in that place."""
    row_bytes: int = 0
    """Of rows that are laid out for a product, which have the dtype "uint8"."""

    @property
    def words(self) -> int:
        if not self.row_bytes:
            return math.prod(self.shape)
        multiple = library.row_multiple()
        rows = math.ceil(self.shape[0] / multiple) * multiple
        return math.ceil(rows * self.row_bytes / 4)

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.first + math.ceil(self.words / LINE) * LINE


@dataclass(frozen=True)
class Kernel:
    """A kernel of the library, as a function of values.

    Attributes:
        shapes: makes those of its outputs from those of its inputs.
        dtypes: of its outputs.
        row_bytes: of its output, if that is rows that are laid out for a product.
    """

    name: str
    shapes: Callable[..., Sequence[Shape]]
    dtypes: tuple[str, ...] = ("float32",)
    row_bytes: int = 0

    def __call__(self, x: Value, *rest: Any) -> Any:
        """Adds an instruction to the program of `x` -> its output, or a tuple of several.

        The rest may be values, numpy arrays, which are constants, and Parameters.
        """
        shapes = self.shapes(*[tuple(each.shape) for each in (x, *rest)])
        outputs = tuple(
            Value(x.program, *each, row_bytes=self.row_bytes) for each in zip(shapes, self.dtypes)
        )
        x.program.add(self.name, (x, *rest), outputs)
        return outputs if len(outputs) > 1 else outputs[0]


class Instruction(NamedTuple):
    kernel: int
    operands: tuple[Union[Value, int], ...]


class Program:
    """What a step computes.

    Attributes:
        parameters: that it reads and writes, each once.
        number_count: int32 numbers that every step brings.
    """

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self.number_count = 0
        self._instructions: list[Instruction] = []
        self._places: dict[int, int] = {}
        """`id` of a Parameter -> its place."""
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}

    def numbers(self, *shape: int) -> Value:
        """The next of the int32 numbers that every step brings."""
        value = Value(self, shape, "int32", NUMBERS, self.number_count)
        self.number_count += value.words
        return value

    def add(self, kernel: str, inputs: Sequence[Any], outputs: Sequence[Value]) -> None:
        """Adds an instruction.

        Raises:
            KeyError: the library has no such kernel.
        """
        operands = (*map(self._operand, inputs), *outputs)
        self._instructions.append(Instruction(library.kernel_number(kernel), operands))

    def _operand(self, x: Any) -> Union[Value, int]:
        if isinstance(x, Value):
            return x
        if isinstance(x, np.ndarray):
            key = str(x.dtype), x.shape, x.tobytes()
            return self._constants.setdefault(key, Value(self, x.shape, key[0], CODE))
        if id(x) not in self._places:
            self._places[id(x)] = PARAMETERS + len(self.parameters)
            self.parameters.append(x)
        return self._places[id(x)]

    def code(self, results: Sequence[Value]) -> NDArray[np.int32]:
        """The whole program; `results` are what the operator returns."""
        for place, result in enumerate(results, PARAMETERS + len(self.parameters)):
            result.place = place
        operands = [operand for one in self._instructions for operand in one.operands]
        values = dict.fromkeys(operand for operand in operands if isinstance(operand, Value))
        numbers = {value: -1 - number for number, value in enumerate(values)}
        instructions: list[int] = []
        for kernel, of_it in self._instructions:
            words = [one if isinstance(one, int) else numbers[one] for one in of_it]
            instructions += [kernel, len(words), *words]
        head = [len(values), len(self._instructions), self._lay_out()]
        end = len(head) + sum(4 + len(value.shape) for value in values) + len(instructions)
        for constant in self._constants.values():
            constant.first = end
            end += constant.words
        for value in values:
            dtype = DTYPES.index(value.dtype)
            head += [value.place, value.first, dtype, len(value.shape), *value.shape]
        constants = b"".join(data for _, _, data in self._constants)
        words_before = np.array(head + instructions, np.int32)
        return np.concatenate([words_before, np.frombuffer(constants, np.int32)])

    def _lay_out(self) -> int:
        """Gives values their places in the library's memory -> words that it takes.

        The largest first, each to the lowest place that no other has at the same time ("greedy by
        size", Pisarchyk and Lee 2020).
        """
        lives: dict[Value, range] = {}
        for number, instruction in enumerate(self._instructions):
            for one in instruction.operands:
                if isinstance(one, Value) and one.place == MEMORY:
                    begin = lives[one].start if one in lives else number
                    lives[one] = range(begin, number + 1)
        placed: list[Value] = []
        for value in sorted(lives, key=lambda one: -one.words):
            life = lives[value]
            for other in sorted(placed, key=lambda one: one.first):
                meet = lives[other].start < life.stop and life.start < lives[other].stop
                if meet and value.end > other.first:
                    value.first = max(value.first, other.end)
            placed.append(value)
        return max((value.end for value in placed), default=0)


class CapturedProgram:
    """The launch of `run_program` that MindSpore has just made, to be made again without MindSpore.

    Its arguments are in memory of MindSpore's graph and Parameters, which must outlive this object.

    Raises:
        GLMMultiUserError: there was none since the last one was captured.
    """

    def __init__(self) -> None:
        self._library = library.open_library()
        self._launch = self._library.glm_capture()
        if self._launch is None:
            raise GLMMultiUserError("MindSpore has not launched the operator of the step")
        weakref.finalize(self, self._library.glm_forget, self._launch)

    def replay(self) -> None:
        """Raises GLMMultiUserError if a kernel refuses its arguments."""
        refused = self._library.glm_replay(self._launch)
        if refused:
            raise GLMMultiUserError(f"a kernel refused, in line {refused} of its source")
