"""Everything that relies on how MindSpore works inside, and not on what it documents.

Tried with MindSpore 2.7.2 and 2.10.0.
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
"""MindSpore's environment variables."""

FIND_DEPENDENCIES = "_get_compile_cache_dep_files"
"""MindSpore's function that is called once for every graph to compile while the cache is on."""

Init = TypeVar("Init", bound=Callable[..., None])


@atexit.register
def keep_cells() -> None:
    """When the process ends, cells may outlive the modules that their `__del__` needs; each would
    print an error."""
    nn.Cell.__del__ = lambda cell: None


def alike_but_for_parameters(init: Init) -> Init:
    """Decorates `__init__` of a model's layers, of which nothing but Parameters may differ.

    MindSpore infers and simplifies the graph of the first one for all of them, and then puts it
    where each is called, with that one's Parameters. It does not check that they are alike. It
    documents `lazy_inline` for Ascend alone, but this policy works on a CPU, too.
    """
    decorated: Init = lazy_inline(attrs=[], policy="front")(init)
    return decorated


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


def drop_graphs(cell: nn.Cell) -> None:
    """Frees the graphs that were compiled for this cell, as MindSpore does with the cell; the next
    calls compile new ones."""
    if cell.compile_cache:
        nn_cell._cell_graph_executor.del_net_res(cell, cell.compile_cache)
        cell.compile_cache.clear()


def free_with_last_reference(cell: nn.Cell) -> None:
    """Has the memory of a cell's Parameters freed with the last reference to them. No graph may be
    compiled or run with them any more.

    Otherwise it stays until Python collects garbage, because a Parameter and its ParamInfo refer to
    each other; and MindSpore refers to those of the cell that it has compiled last.
    """
    nn_cell._cell_graph_executor._graph_executor.set_weights_values({})
    for parameter in cell.get_parameters():
        parameter.param_info.obj = None


def soc_version() -> str:
    """The kind of Ascend card, as MindSpore names it; empty on a CPU."""
    return str(MSContext.get_instance().get_ascend_soc_version())


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
@collecting_new_objects_only()
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


@contextmanager
def cached_graph(kept: Optional[bytes]) -> Iterator[list[bytes]]:
    """The first graph that is compiled inside comes from `kept`, if MindSpore can read it.

    Yields:
        An empty list; afterwards, what is to be kept of the graph if it was compiled.
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
    """The folder in which MindSpore looks for compiled graphs; a process has one.

    MindSpore names a graph's file after the number of graphs that were compiled before while the
    cache was on, and loads it unseen. So the folder is this process's own, the cache is on only
    while a certain graph is compiled, and that graph's file is put there when it is due. Once a
    file is missing, MindSpore reads no other one in this process.

    Attributes:
        entry: takes the place of the script that was started, whose files MindSpore would compare.
        compiled: graphs so far.
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
        """Before a graph is compiled."""
        if content is not None:
            self._path(self.compiled).write_bytes(content)
        self.compiled += 1

    def take(self, number: int) -> Optional[bytes]:
        """Removes what there is of a graph."""
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
