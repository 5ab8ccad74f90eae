"""A step as one operator: cells record its instructions, and the library executes them.

Native cells compute nothing themselves. They are traced once, outside of MindSpore's graphs, with
`Value`s in place of tensors, and each adds an instruction to a program. The operator `run_program`
(`cpu/program.cpp`) executes the whole program. All of its arguments stay at the same addresses, so
one launch by MindSpore's graph can be captured and replayed in every step.

    code         header: number of values, number of instructions, words of the library's memory;
                 then values, instructions and constants
    value        buffer, offset in words, dtype (index in `DTYPES`), rank, shape. The buffer is the
                 index of an argument of the operator, or `MEMORY`
    instruction  number of the kernel, number of operands, operands: inputs, then outputs. An
                 operand is the index of an argument of the operator or, if negative, a value: -1 is
                 the first, -2 the second

A word is four bytes. Arguments are the code, the inputs of the step, Parameters, and the results.
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
from glm_multiuser.errors import ConfigError, GLMMultiUserError

Shape = tuple[int, ...]

DTYPES = ("int32", "float32", "uint8")
MEMORY, CODE, INPUTS, PARAMETERS = -1, 0, 1, 2
"""Buffers of values; that of the first Parameter is `PARAMETERS`."""

LINE = 16
"""Words of a cache line, to which values in the library's memory are aligned."""
WORD = 4
"""Bytes of a word."""
MEMORY_WORDS_MAX = 2**31 - 1
"""Limit of that memory, whose offsets are int32."""


@dataclass(eq=False)
class Value:
    """A tensor of the recorded step."""

    program: Program
    shape: Shape
    dtype: str
    buffer: int = MEMORY
    offset: int = 0
    """In words."""
    row_bytes: int = 0
    """Of packed inputs of a product, which have the dtype "uint8"; otherwise 0."""

    @property
    def words(self) -> int:
        if not self.row_bytes:
            return math.prod(self.shape)
        multiple = library.row_multiple()
        rows = math.ceil(self.shape[0] / multiple) * multiple
        return math.ceil(rows * self.row_bytes / 4)

    @property
    def end(self) -> int:
        """The offset at which the next value may begin."""
        return self.offset + math.ceil(self.words / LINE) * LINE


@dataclass(frozen=True)
class Kernel:
    """A kernel of the library, as a function of values.

    Attributes:
        shapes: computes the shapes of its outputs from those of its inputs.
        dtypes: of its outputs.
        row_bytes: of its output, if that is packed inputs of a product.
    """

    name: str
    shapes: Callable[..., Sequence[Shape]]
    dtypes: tuple[str, ...] = ("float32",)
    row_bytes: int = 0

    def __call__(self, x: Value, *rest: Any) -> Any:
        """Adds an instruction to the program of `x`; returns its output, or a tuple of several.

        Other operands may be values, NumPy arrays, which become constants, and Parameters.
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
    """The recorded instructions of a step.

    Attributes:
        parameters: the Parameters that it reads and writes, each once.
        input_words: size of the int32 inputs of a step.
    """

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self.input_words = 0
        self._instructions: list[Instruction] = []
        self._buffers: dict[int, int] = {}
        """`id` of a Parameter -> its buffer."""
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}

    def step_inputs(self, *shape: int) -> Value:
        """Allocates an int32 input that is set in every step."""
        value = Value(self, shape, "int32", INPUTS, self.input_words)
        self.input_words += value.words
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
        if id(x) not in self._buffers:
            self._buffers[id(x)] = PARAMETERS + len(self.parameters)
            self.parameters.append(x)
        return self._buffers[id(x)]

    def code(self, results: Sequence[Value]) -> NDArray[np.int32]:
        """Encodes the program; `results` are the outputs of the operator.

        Raises:
            ConfigError: the values of a step take more memory than int32 offsets reach.
        """
        for buffer, result in enumerate(results, PARAMETERS + len(self.parameters)):
            result.buffer = buffer
        operands = [operand for one in self._instructions for operand in one.operands]
        values = dict.fromkeys(operand for operand in operands if isinstance(operand, Value))
        numbers = {value: -1 - number for number, value in enumerate(values)}
        instructions: list[int] = []
        for kernel, of_it in self._instructions:
            words = [one if isinstance(one, int) else numbers[one] for one in of_it]
            instructions += [kernel, len(words), *words]
        words_of_memory = self._plan_memory()
        if words_of_memory > MEMORY_WORDS_MAX:
            raise ConfigError(
                f"the values of a step take {words_of_memory * WORD >> 20:,} MiB, and may take at "
                f"most {MEMORY_WORDS_MAX * WORD >> 20:,}: prefill_chunk is too large for this model"
            )
        head = [len(values), len(self._instructions), words_of_memory]
        end = len(head) + sum(4 + len(value.shape) for value in values) + len(instructions)
        for constant in self._constants.values():
            constant.offset = end
            end += constant.words
        for value in values:
            dtype = DTYPES.index(value.dtype)
            head += [value.buffer, value.offset, dtype, len(value.shape), *value.shape]
        constants = b"".join(data for _, _, data in self._constants)
        words_before = np.array(head + instructions, np.int32)
        return np.concatenate([words_before, np.frombuffer(constants, np.int32)])

    def _plan_memory(self) -> int:
        """Assigns offsets in the library's memory to values; returns its size in words.

        In descending order of size, each value gets the lowest offset that is free during its
        lifetime ("greedy by size", Pisarchyk and Lee 2020).
        """
        lives: dict[Value, range] = {}
        for number, instruction in enumerate(self._instructions):
            for one in instruction.operands:
                if isinstance(one, Value) and one.buffer == MEMORY:
                    begin = lives[one].start if one in lives else number
                    lives[one] = range(begin, number + 1)
        placed: list[Value] = []
        for value in sorted(lives, key=lambda one: -one.words):
            life = lives[value]
            for other in sorted(placed, key=lambda one: one.offset):
                meet = lives[other].start < life.stop and life.start < lives[other].stop
                if meet and value.end > other.offset:
                    value.offset = max(value.offset, other.end)
            placed.append(value)
        return max((value.end for value in placed), default=0)


class CapturedProgram:
    """The last launch of `run_program` by MindSpore, to be replayed without MindSpore.

    The memory of its arguments belongs to MindSpore's graph and Parameters, which must outlive this
    object.

    Raises:
        GLMMultiUserError: there was no launch since the last one was captured.
    """

    def __init__(self) -> None:
        self._library = library.open_library()
        self._launch = self._library.glm_capture()
        if self._launch is None:
            raise GLMMultiUserError("MindSpore has not launched the operator of the step")
        # Not at exit, where the device thread may still replay it.
        weakref.finalize(self, self._library.glm_forget, self._launch).atexit = False

    def replay(self) -> None:
        """Raises GLMMultiUserError if a kernel rejects its arguments."""
        refused = self._library.glm_replay(self._launch)
        if refused:
            raise GLMMultiUserError(f"a kernel refused, in line {refused} of its source")
