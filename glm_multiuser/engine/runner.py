"""Rows -> tensors -> graph -> logits; the only room of the engine that calls the device.

Every method runs on the device thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.scheduler import Step
from glm_multiuser.memory import cache_bytes_per_user
from glm_multiuser.models.users import MultiUserModel
from glm_multiuser.progress import Progress


class RowResults(Protocol):
    """What a graph says about the next token of the rows of `Step.answered`."""

    tokens: NDArray[Any]
    """int32 [rows]: the most likely next token of each."""
    finite: NDArray[Any]
    """bool [rows]: whether everything that led to it was finite."""

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        """float32 [len(rows), vocab_size], brought to the host only when asked for."""


class Runner(Protocol):
    """What the engine needs of a model; tests put a mock in its place."""

    vocab_size: int

    def take(self, prompts: Sequence[Request]) -> Sequence[int]: ...

    def parts(self, step: Step) -> Sequence[Step]: ...

    def run(self, step: Step) -> RowResults: ...

    def save(self, slot: int, request: Request) -> Any: ...

    def restore(self, slot: int, request: Request, saved: Any) -> None: ...

    def resize(self, users: int, progress: Progress) -> None: ...

    def close(self) -> None: ...

    @property
    def compiles(self) -> int: ...


@dataclass
class DeviceResults:
    """`RowResults` whose logits stay on the device until somebody asks for them."""

    tokens: NDArray[Any]
    finite: NDArray[Any]
    device_logits: Tensor
    device_rows: Sequence[int]

    def logits(self, rows: Sequence[int]) -> NDArray[Any]:
        host: NDArray[Any] = self.device_logits.asnumpy()
        return host[[self.device_rows[row] for row in rows]]


Job = tuple[str, Callable[[], Optional[NDArray[Any]]]]
"""A graph to compile: what it is, and a call that does it and may return logits that must be equal
to those of the others."""


class GraphRunner:
    """Runs a model's graphs for an engine; subclasses know which graphs there are.

    Args:
        model: with its weights; its caches are laid out here.
        engine: users, sequence length, and what else the layout depends on.
    """

    kernels: str
    """"native" or "portable"."""

    def __init__(self, model: MultiUserModel, engine: EngineConfig) -> None:
        self.model = model
        self.engine = engine
        self.vocab_size = model.config.vocab_size
        self.graph_seconds = 0.0
        self.compile_seconds = 0.0
        self.batch_invariant = True
        self._retired_compiles = 0
        self._lay_out(engine.users)

    def _lay_out(self, users: int) -> None:
        """Makes caches and entry cells for so many users; nothing is compiled yet."""
        raise NotImplementedError

    def _entries(self) -> Sequence[Any]:
        """The entry cells, whose compiled graphs count."""
        raise NotImplementedError

    def _forget_entries(self) -> None:
        raise NotImplementedError

    def _jobs(self) -> list[Job]:
        """Every graph."""
        raise NotImplementedError

    @property
    def compiles(self) -> int:
        """Graphs compiled so far."""
        return self._retired_compiles + sum(len(entry.compile_cache) for entry in self._entries())

    @property
    def kernel_level(self) -> str:
        """Which of the processor's instructions native kernels use."""
        return ""

    @property
    def weight_dtype(self) -> str:
        """Type of the matrices."""
        return self.model.numerics.compute

    @property
    def cache_bytes_per_user(self) -> int:
        """Keys and values of all layers and positions."""
        dtype = self.model.numerics.compute
        return cache_bytes_per_user(self.model.config, self.engine.seq_length, dtype)

    def compile(self, progress: Progress) -> None:
        """Compiles and runs every graph once, with rows that write nothing."""
        start, graph_seconds = time.monotonic(), self.graph_seconds
        jobs = self._jobs()
        rows: list[NDArray[Any]] = []
        for done, (what, job) in enumerate(jobs):
            progress(done, len(jobs), what)
            logits = job()
            if logits is not None:
                rows.extend(logits)
        progress(len(jobs), len(jobs), "ready")
        self.batch_invariant = all((row == rows[0]).all() for row in rows)
        self.compile_seconds = time.monotonic() - start
        self.graph_seconds = graph_seconds

    def take(self, prompts: Sequence[Request]) -> Sequence[int]:
        """How many tokens of each of the first prompts enter in the next step."""
        raise NotImplementedError

    def parts(self, step: Step) -> Sequence[Step]:
        """The steps that one graph each can run."""
        raise NotImplementedError

    def run(self, step: Step) -> RowResults:
        """Runs one of `parts`; result rows in the order of `Step.answered`."""
        raise NotImplementedError

    def save(self, slot: int, request: Request) -> list[NDArray[Any]]:
        """Copies a slot's keys and values to the host."""
        raise NotImplementedError

    def restore(self, slot: int, request: Request, saved: list[NDArray[Any]]) -> None:
        """Puts into a slot what `save` copied out of this or another one."""
        raise NotImplementedError

    def resize(self, users: int, progress: Progress) -> None:
        """Lays the caches out for another number of users; what they held is gone."""
        self.close()  # the old graphs go before their successors come
        self._lay_out(users)
        self.compile(progress)

    def close(self) -> None:
        """Lets go of the graphs; what frees them is a call to MindSpore too."""
        self._retired_compiles = self.compiles
        self._forget_entries()
        gc.collect()

    def _run_graph(self, graph: Any, *inputs: Any) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        """-> what `MultiUserModel.next_tokens` returns; arrays become int32 tensors."""
        start = time.perf_counter()
        tokens, finite, logits = graph(
            *(to_tensor(one) if isinstance(one, np.ndarray) else one for one in inputs)
        )
        host_tokens, host_finite = tokens.asnumpy(), np.isfinite(finite.asnumpy())
        self.graph_seconds += time.perf_counter() - start
        return host_tokens, host_finite, logits


def to_tensor(values: NDArray[Any]) -> Tensor:
    return Tensor(values.astype(np.int32), ms.int32)
