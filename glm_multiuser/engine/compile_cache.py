"""A compile cache on disk, which makes the next start faster.

The output of MindSpore's front end for a graph is stored in a file, whose name is a digest of
everything that the graph depends on, such as version, model, layout and device. The back end still
compiles it for the device at every start. Files are written to a temporary file and renamed, and
begin with a checksum.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Optional

import mindspore as ms
import xxhash

from glm_multiuser.config import EngineConfig, folder_of
from glm_multiuser.errors import ConfigError
from glm_multiuser.mindspore_internals import (
    CACHE_ENABLED,
    CACHE_PATH,
    cached_graph,
    soc_version,
)
from glm_multiuser.models.multi_user import MultiUserModel
from glm_multiuser.version import own_version

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]

CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class CompileCache:
    """The compiled graphs of one layout of one model.

    Attributes:
        folder: of the files; None disables the cache.
        depends_on: everything that all graphs depend on, as JSON.
    """

    folder: Optional[Path]
    depends_on: str = ""

    @classmethod
    def of(
        cls, model: MultiUserModel, engine: EngineConfig, users: int, shapes: Any
    ) -> CompileCache:
        """The cache of an engine with `users` users.

        Args:
            shapes: measured at this start; the graphs' shapes depend on it.

        Raises:
            ConfigError: MindSpore's own cache is on.
        """
        if engine.compile_cache_dir is None:
            return cls(None)
        if os.environ.get(CACHE_ENABLED) == "1":
            raise ConfigError(
                f"compile_cache_dir is {engine.compile_cache_dir!r} and the environment variable "
                f"{CACHE_ENABLED} is '1'; MindSpore has one compile cache in a process: unset one"
            )
        depends_on = {
            "versions": [own_version(), _digest_of_sources(), str(ms.__version__)],
            "model": repr(model.config),
            "backend": [model.backend.name, model.backend.kept_as, repr(model.backend)],
            "layout": [users, engine.seq_length, engine.users_per_cell, engine.prefill_chunk],
            "device": [
                *(engine.device_target, soc_version(), _variables()),
                repr(ms.get_context("jit_config")),
            ],
            "shapes": repr(shapes),
        }
        folder = folder_of("compile_cache_dir", engine.compile_cache_dir)
        return cls(folder, json.dumps(depends_on, sort_keys=True))

    @contextlib.contextmanager
    def graph(self, what: str) -> Iterator[None]:
        """Loads the graph that is compiled inside the context from its file, or stores it."""
        path = self.path(what)
        if path is None:
            yield
            return
        with cached_graph(read(path)) as made:
            yield
        for content in made:
            write(path, content)

    def path(self, what: str) -> Optional[Path]:
        """The file of a graph."""
        if self.folder is None:
            return None
        name = hashlib.sha256(f"{self.depends_on} {what}".encode()).hexdigest()[:32]
        return self.folder / f"{name}.graph"


def read(path: Path) -> Optional[bytes]:
    """Reads a graph; None if there is no such file, or if it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("a graph is compiled anew: %s", error)
        return None
    checksum, graph = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    if xxhash.xxh3_128_digest(graph) != checksum:
        logger.warning("a graph is compiled anew: %s is damaged", path)
        return None
    return graph


def write(path: Path, graph: bytes) -> None:
    """Stores a graph. Logs a warning if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file, name = mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with open(file, "wb") as part:
                part.write(xxhash.xxh3_128_digest(graph) + graph)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        logger.warning("a compiled graph is not kept: %s", error)


def _variables() -> dict[str, str]:
    """The environment variables that may affect compilation."""
    own = (CACHE_ENABLED, CACHE_PATH)
    names = (name for name in os.environ if name.startswith("MS_") and name not in own)
    return {name: os.environ[name] for name in names}


@functools.lru_cache(maxsize=1)
def _digest_of_sources() -> str:
    """A digest of this package's code, which may change in a checkout without a new version."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
