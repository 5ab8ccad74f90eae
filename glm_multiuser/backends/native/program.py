"""A step as one operator: cells say what it computes, and the library computes it.

Native cells compute nothing themselves. They are called once, outside of MindSpore's graphs, with
`Value`s in place of tensors, and each adds an instruction to a program. The operator `run_program`
(`cpu/program.cpp`) carries out the whole program, so MindSpore launches one operator in a step.

    code         words: how many values and instructions there are, and how many words of the
                 library's memory; then the values, the instructions, the constants, the addresses
    value        place, first word there, dtype (of `DTYPES`), rank, shape. The place is an argument
                 of the operator, by its number, or `MEMORY`; or it is `ADDRESS`, and the value lies
                 in memory whose address begins with that word of the code
    instruction  number of the kernel, how many operands it has, the operands: inputs, then outputs.
                 An operand is an argument of the operator, by its number, or, below zero, a value:
                 -1 the first, -2 the second

A word is four bytes. Arguments are the code, the numbers of the step, the Parameters that the
program writes to, and the results. MindSpore goes through all inputs of an operator each time that
it launches it, so Parameters that are only read, the weights, are no inputs; the program has their
addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.backends.native import library
from glm_multiuser.mindspore_internals import memory_of

Shape = tuple[int, ...]

DTYPES = ("int32", "float32", "float16", "int16", "int8", "uint8")
ADDRESS, MEMORY, CODE, NUMBERS, PARAMETERS = -2, -1, 0, 1, 2
"""Places of values; the first Parameter's is `PARAMETERS`."""

ADDRESS_WORDS = 2

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

    @property
    def words(self) -> int:
        return math.prod(self.shape)

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
        written: of its inputs, the first that it writes to, and behind the last; None: to the end.
    """

    name: str
    shapes: Callable[..., Sequence[Shape]]
    dtypes: tuple[str, ...] = ("float32",)
    written: tuple[int, Optional[int]] = (0, 0)

    def __call__(self, x: Value, *rest: Any) -> Any:
        """Adds an instruction to the program of `x` -> its output, or a tuple of several.

        The rest may be values, numpy arrays, which are constants, and Parameters.
        """
        shapes = self.shapes(*[tuple(each.shape) for each in (x, *rest)])
        outputs = tuple(Value(x.program, *each) for each in zip(shapes, self.dtypes))
        inputs = (x, *rest)
        x.program.add(self.name, inputs, outputs, inputs[slice(*self.written)])
        return outputs if len(outputs) > 1 else outputs[0]


class Instruction(NamedTuple):
    kernel: int
    operands: tuple[Union[Value, int], ...]


class Program:
    """What a step computes.

    Attributes:
        parameters: that it writes to, each once.
        number_count: int32 numbers that every step brings.
        weights: Parameters that are only read, each once.
    """

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self.number_count = 0
        self.weights: list[Any] = []
        self._instructions: list[Instruction] = []
        self._places: dict[int, Union[Value, int]] = {}
        """`id` of a Parameter -> its place, or the value that it is."""
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}

    def numbers(self, *shape: int) -> Value:
        """The next of the int32 numbers that every step brings."""
        value = Value(self, shape, "int32", NUMBERS, self.number_count)
        self.number_count += value.words
        return value

    def add(
        self,
        kernel: str,
        inputs: Sequence[Any],
        outputs: Sequence[Value],
        written: Sequence[Any] = (),
    ) -> None:
        """Adds an instruction; `written` are the inputs that it writes to.

        Raises:
            KeyError: the library has no such kernel.
        """
        for parameter in written:
            if id(parameter) not in self._places:
                self._places[id(parameter)] = PARAMETERS + len(self.parameters)
                self.parameters.append(parameter)
        operands = (*map(self._operand, inputs), *outputs)
        self._instructions.append(Instruction(library.kernel_number(kernel), operands))

    def _operand(self, x: Any) -> Union[Value, int]:
        if isinstance(x, Value):
            return x
        if isinstance(x, np.ndarray):
            key = str(x.dtype), x.shape, x.tobytes()
            return self._constants.setdefault(key, Value(self, x.shape, key[0], CODE))
        if id(x) not in self._places:
            memory = memory_of(x)
            self._places[id(x)] = Value(self, memory.shape, str(memory.dtype), ADDRESS)
            self.weights.append(x)
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
        weights = [one for one in self._places.values() if isinstance(one, Value)]
        for weight in weights:
            weight.first = end
            end += ADDRESS_WORDS
        for value in values:
            dtype = DTYPES.index(value.dtype)
            head += [value.place, value.first, dtype, len(value.shape), *value.shape]
        constants = b"".join(data for _, _, data in self._constants)
        addresses = np.array([memory_of(one).ctypes.data for one in self.weights], np.uint64)
        words_before = np.array(head + instructions, np.int32)
        return np.concatenate(
            [words_before, np.frombuffer(constants, np.int32), addresses.view(np.int32)]
        )

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
