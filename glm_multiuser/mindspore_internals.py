"""All code that relies on undocumented MindSpore internals.

Tested with MindSpore 2.7.2 and 2.10.0.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Callable, Optional, TypeVar

import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn
from mindspore._c_expression import MSContext
from mindspore.nn import cell as nn_cell
from numpy.typing import NDArray

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.garbage import collecting_new_objects_only

CACHE_ENABLED, CACHE_PATH = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH"
"""Environment variables of MindSpore's compile cache."""

FIND_DEPENDENCIES = "_get_compile_cache_dep_files"
"""MindSpore calls this function once per compiled graph while the cache is on."""

Init = TypeVar("Init", bound=Callable[..., None])


@atexit.register
def disable_finalizers() -> None:
    """Disables `__del__` of cells at exit: they may outlive the modules that it needs, and each
    would print an error."""
    nn.Cell.__del__ = lambda cell: None


def alike_but_for_parameters(init: Init) -> Init:
    """Decorates `__init__` of a model's layers, which may differ in nothing but Parameters.

    MindSpore infers and simplifies the graph of the first layer, and inlines it at the call of each
    layer, with its Parameters. It does not check that layers are alike. `lazy_inline` is only
    documented for Ascend, but this policy also works on CPUs.
    """
    decorated: Init = lazy_inline(attrs=[], policy="front")(init)
    return decorated


@contextmanager
def cells_as_functions() -> Iterator[None]:
    """Makes a call of a cell a call of `construct`, with any arguments and without compilation.

    PYNATIVE_MODE would also do it, but renames Parameters.
    """
    call = nn.Cell.__call__
    nn.Cell.__call__ = lambda cell, *args: cell.construct(*args)
    try:
        yield
    finally:
        nn.Cell.__call__ = call


def compiled_graphs(cell: nn.Cell) -> int:
    """Returns the number of graphs compiled for this cell."""
    return len(cell.compile_cache)


def drop_graphs(cell: nn.Cell) -> None:
    """Frees the compiled graphs of this cell, as MindSpore does when it frees the cell; later calls
    recompile."""
    if cell.compile_cache:
        nn_cell._cell_graph_executor.del_net_res(cell, cell.compile_cache)
        cell.compile_cache.clear()


def free_with_last_reference(cell: nn.Cell) -> None:
    """Lets reference counting free the memory of a cell's Parameters. No graph may be compiled or
    run with them afterwards.

    Otherwise it is only freed by Python's garbage collection, because a Parameter and its ParamInfo
    refer to each other; and MindSpore refers to those of the last compiled cell.
    """
    nn_cell._cell_graph_executor._graph_executor.set_weights_values({})
    for parameter in cell.get_parameters():
        parameter.param_info.obj = None


def soc_version() -> str:
    """Returns MindSpore's name of the Ascend card's type; empty on CPUs."""
    return str(MSContext.get_instance().get_ascend_soc_version())


def memory_of(parameter: Parameter) -> NDArray[Any]:
    """Returns a view of a Parameter's memory on the CPU; compiled graphs see writes to it."""
    array: NDArray[Any] = parameter.asnumpy()
    return array


def zero_parameter(shape: tuple[int, ...], dtype: Any, name: str) -> Parameter:
    """Creates a Parameter of zeros that take no memory until they are written; `Parameter` would
    copy them."""
    return parameter_of(np.zeros(shape, dtype), name)


def parameter_of(array: NDArray[Any], name: str) -> Parameter:
    """Creates a Parameter that shares the memory of `array`."""
    parameter = Parameter(Tensor(np.zeros([1] * array.ndim, array.dtype)), name=name)
    parameter.set_data(Tensor.from_numpy(array))
    return parameter


@functools.lru_cache(maxsize=1)
@collecting_new_objects_only()
def check_shared_memory() -> None:
    """Checks that graphs see writes through `memory_of`.

    Raises:
        GLMMultiUserError: this version of MindSpore does not share the memory.
    """
    cell, zero = _Reader(), Tensor(np.zeros(2, np.float32))
    cell(zero).asnumpy()
    memory_of(cell.past)[1] = 1.0
    if cell(zero).asnumpy().tolist() != [0.0, 1.0]:
        raise GLMMultiUserError(
            "this version of MindSpore copies a Parameter's memory for the host; saved keys and "
            "values could not be put back. Use kernels='portable', or MindSpore 2.7.2 to 2.10"
        )


@contextmanager
def cached_graph(kept: Optional[bytes]) -> Iterator[list[bytes]]:
    """Loads the first graph that is compiled inside the context from `kept`, if MindSpore can.

    Yields:
        An empty list; on exit, the graph's content is added if it was compiled.
    """
    cache, made = _graph_cache(), list[bytes]()
    api = sys.modules[type(nn_cell._cell_graph_executor).__module__]
    before = cache.compiled

    def on_compile() -> list[str]:
        cache.expect(kept if cache.compiled == before else None)
        return [str(cache.entry)]

    find_dependencies = getattr(api, FIND_DEPENDENCIES)
    setattr(api, FIND_DEPENDENCIES, on_compile)
    os.environ[CACHE_ENABLED] = "1"
    try:
        yield made
    finally:
        os.environ[CACHE_ENABLED] = "0"
        setattr(api, FIND_DEPENDENCIES, find_dependencies)
        written = [cache.take(number) for number in range(before, cache.compiled)]
    made.extend(content for content in written[:1] if content not in (None, kept))


class _GraphCache:
    """MindSpore's compile cache folder, one per process.

    MindSpore names a graph's file by the number of graphs compiled earlier while the cache was on,
    and loads it without checks. So the folder is private to the process, the cache is on only while
    a certain graph is compiled, and that graph's file is put there just before. Once a file is
    missing, MindSpore reads no other one in this process.

    Attributes:
        entry: stands in for the main script, whose files MindSpore would compare.
        compiled: number of graphs so far.
    """

    def __init__(self) -> None:
        folder = Path(mkdtemp(prefix="glm_multiuser-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.entry = folder / "entry.py"
        self.compiled = 0
        self._graphs = folder / "rank_0" / "graph_cache"
        self._graphs.mkdir(parents=True)
        content = b"# Nothing that a graph depends on.\n"
        self.entry.write_bytes(content)
        digest = hashlib.sha256(hashlib.sha256(content).hexdigest().encode()).hexdigest()
        (self._graphs / "compile_dependency.hash").write_text(digest, encoding="ascii")
        os.environ[CACHE_PATH] = str(folder)

    def expect(self, content: Optional[bytes]) -> None:
        """Provides the next graph's file, if any."""
        if content is not None:
            self._path(self.compiled).write_bytes(content)
        self.compiled += 1

    def take(self, number: int) -> Optional[bytes]:
        """Removes a graph's file, and returns its content."""
        path = self._path(number)
        content = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        return content

    def _path(self, number: int) -> Path:
        return self._graphs / f"compile_cache_{number}.mindir"


_graph_cache = functools.lru_cache(maxsize=1)(_GraphCache)


class _Reader(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.past = Parameter(Tensor(np.zeros(2, np.float32)), name="past")

    def construct(self, x: Tensor) -> Tensor:
        return self.past + x
