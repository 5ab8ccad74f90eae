"""The common part of both runners: compiling graphs, and dropping them."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from numpy.typing import NDArray

from glm_multiuser.config import EngineConfig
from glm_multiuser.engine.chunk_length import ChunkLength
from glm_multiuser.engine.compile_cache import CompileCache
from glm_multiuser.engine.fingerprint import fingerprint_of
from glm_multiuser.engine.request import Request
from glm_multiuser.engine.runner import Runner
from glm_multiuser.garbage import collecting_new_objects_only
from glm_multiuser.mindspore_internals import compiled_graphs, free_with_last_reference
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.models.positions import PrefixPositions
from glm_multiuser.progress import Progress
from glm_multiuser.sessions.session import TOKEN_BYTES

Job = tuple[str, Callable[[], Optional[NDArray[Any]]]]
"""A graph to compile: its description, and a function that compiles it and may return logits, which
must be equal for all jobs."""


class GraphRunner(Runner):
    """Runs a model's graphs for an engine; subclasses define the graphs.

    Args:
        model: with its weights; its caches are allocated here.
        engine: users, sequence length, and other settings that the layout depends on.
    """

    users: int
    chunk_length: ChunkLength
    kernel_level = ""
    _forward: Any = None
    """The entry cell of the model."""
    _replace_cache: Any = None
    """The entry cell that overwrites caches; none with native kernels."""

    def __init__(self, model: MultiUserModel, engine: EngineConfig) -> None:
        self.model = model
        self.engine = engine
        self.vocab_size = model.config.vocab_size
        self.kernels = model.backend.name
        self.weight_dtype = model.backend.kept_as
        self.cache_dtype = model.backend.cache_dtype
        self.graph_seconds = 0.0
        self.compile_seconds = 0.0
        self.batch_invariant = True
        self._retired_compiles = 0
        self._positions: WeakKeyDictionary[Request, PrefixPositions] = WeakKeyDictionary()
        self._lay_out(engine.users)

    def _lay_out(self, users: int) -> None:
        """Allocates caches and creates entry cells for `users` users; compiles nothing."""
        raise NotImplementedError

    def _make_entries(self) -> None:
        """Creates the entry cells for the existing caches."""
        raise NotImplementedError

    def _entries(self) -> Sequence[Any]:
        """The entry cells, whose compiled graphs are counted."""
        return [cell for cell in (self._forward, self._replace_cache) if cell is not None]

    def _jobs(self) -> list[Job]:
        """Every graph."""
        raise NotImplementedError

    def _compile_cache(self) -> CompileCache:
        """Where the graphs of `_jobs` are kept for the next start."""
        return CompileCache(None)

    def _positions_of(self, request: Request) -> PrefixPositions:
        """Positions of a request of ChatGLM-6B; its prompt is searched once."""
        found = self._positions.get(request)
        if found is None:
            found = PrefixPositions.of(request.prompt_token_ids, self.model.config)
            self._positions[request] = found
        return found

    @property
    def compiles(self) -> int:
        """Graphs compiled so far."""
        return self._retired_compiles + sum(map(compiled_graphs, self._entries()))

    @property
    def cache_bytes_per_user(self) -> int:
        """Memory of the keys and values of all layers and positions."""
        return self.cache_bytes(self.engine.seq_length)

    def slot_bytes(self, positions: int) -> int:
        per_position = self.cache_bytes_per_user // self.engine.seq_length
        return positions * (TOKEN_BYTES + per_position * self.model.config.is_causal)

    def fingerprint(self) -> str:
        return fingerprint_of(self.model, self.engine, self.kernel_level)

    @collecting_new_objects_only()
    def compile(self, progress: Progress) -> None:
        """Compiles every graph and runs it once, with rows that leave no trace."""
        start, graph_seconds = time.monotonic(), self.graph_seconds
        jobs = self._jobs()
        rows: list[NDArray[Any]] = []
        cache = self._compile_cache()
        for done, (what, job) in enumerate(jobs):
            progress(done, len(jobs), what)
            with cache.graph(what):
                logits = job()
            if logits is not None:
                rows.extend(logits)
        progress(len(jobs), len(jobs), "ready")
        self.batch_invariant = all((row == rows[0]).all() for row in rows)
        self.compile_seconds = time.monotonic() - start
        self.graph_seconds = graph_seconds

    def resize(self, users: int, progress: Progress) -> None:
        self._drop_graphs()  # free the old ones first
        self._lay_out(users)
        self.compile(progress)

    def recover(self) -> None:
        self._drop_graphs()  # MindSpore cannot run a graph again that has failed
        self._make_entries()

    def close(self) -> None:
        self._drop_graphs()
        free_with_last_reference(self.model)

    def _drop_graphs(self) -> None:
        self._retired_compiles = self.compiles
        self._forward = self._replace_cache = None
        gc.collect()
