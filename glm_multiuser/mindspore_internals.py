"""Everything that relies on how MindSpore works inside, and not on what it documents.

Tried with MindSpore 2.7.2 and 2.10.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from glm_multiuser.errors import GLMMultiUserError


def skip_argument_checks(cell: nn.Cell) -> None:
    """Once it is compiled, calls go straight to the graph.

    It is MindSpore's phase for incremental inference. Its checks of arguments and cells, which
    cannot have changed, cost milliseconds. For cells with a single graph.
    """
    cell.phase = "increment"


@contextmanager
def cells_as_functions() -> Iterator[None]:
    """Calling a cell is calling its `construct`, with any arguments; nothing is compiled.

    PYNATIVE_MODE would do it, too, but renames Parameters.
    """
    call = nn.Cell.__call__
    nn.Cell.__call__ = lambda cell, *args: cell.construct(*args)
    try:
        yield
    finally:
        nn.Cell.__call__ = call


def compiled_graphs(cell: nn.Cell) -> int:
    """How many graphs were compiled for this cell."""
    return len(cell.compile_cache)


def memory_of(parameter: Parameter) -> NDArray[Any]:
    """A Parameter's own memory on the CPU; what is written to it is seen by compiled graphs."""
    array: NDArray[Any] = parameter.asnumpy()
    return array


def zero_parameter(shape: tuple[int, ...], dtype: Any, name: str) -> Parameter:
    """A Parameter whose zeros take no memory until something is written to them; `Parameter` would
    copy what it is given."""
    return parameter_of(np.zeros(shape, dtype), name)


def parameter_of(array: NDArray[Any], name: str) -> Parameter:
    """A Parameter whose memory is that of `array`; nothing is copied."""
    parameter = Parameter(Tensor(np.zeros([1] * array.ndim, array.dtype)), name=name)
    parameter.set_data(Tensor.from_numpy(array))
    return parameter


@functools.lru_cache(maxsize=1)
def check_shared_memory() -> None:
    """Makes sure that a graph sees what is written through `memory_of`.

    Raises:
        GLMMultiUserError: it does not, with this version of MindSpore.
    """
    cell, zero = _Reader(), Tensor(np.zeros(2, np.float32))
    cell(zero).asnumpy()
    memory_of(cell.past)[1] = 1.0
    if cell(zero).asnumpy().tolist() != [0.0, 1.0]:
        raise GLMMultiUserError(
            "this version of MindSpore copies a Parameter's memory for the host; saved keys and "
            "values could not be put back. Use kernels='portable', or MindSpore 2.7.2 to 2.10"
        )


class _Reader(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.past = Parameter(Tensor(np.zeros(2, np.float32)), name="past")

    def construct(self, x: Tensor) -> Tensor:
        return self.past + x
