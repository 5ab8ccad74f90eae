"""A cache of packed weights on disk, which the next start maps into memory.

There is a safetensors file per checkpoint and type of weights. Its tensors are the arrays that the
kernels read, and its metadata describes their source and has a checksum of each. Mapped pages are
used unchanged, so processes on one machine share them, and the system may evict and reload them.

Files are written to a temporary file and renamed, so readers never see partial files; checksums
detect any other damage.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Optional

import numpy as np
import xxhash

from glm_multiuser.checkpoint.stored_tensor import Array, Sizes, byte_size
from glm_multiuser.config import folder_of
from glm_multiuser.device import cores
from glm_multiuser.huge_pages import advise_huge_pages
from glm_multiuser.progress import Progress

logger = logging.getLogger(__name__)

FORMAT = 1
"""Incremented whenever the packed format changes."""

OFF = "off"

VARIABLE = "GLM_MULTIUSER_WEIGHT_CACHE"
"""Environment variable: the folder or "off", if the setting is None."""

DTYPES = {"<f4": "F32", "<f2": "F16", "<i2": "I16", "|i1": "I8", "|u1": "U8"}
"""Type of an array -> its name in a safetensors file."""

LARGEST_HEADER = 100 << 20
"""Bytes; as in the safetensors library."""

CHECKSUM = "xxh3_64 "
"""Prefix of a checksum's metadata key; the name of the tensor follows."""

MOST_BUFFERS = 512
"""Maximum per system call; Linux allows 1,024."""

MIB = 1 << 20

REMAINS = re.compile(r"\..+-[0-9a-f]{16}-[a-z0-9_]{8}\.part", re.DOTALL)
"""Names of partial files of this cache; the folder may have those of others."""


def cache_folder(setting: Optional[str]) -> Optional[Path]:
    """Returns the folder of packed weights: `weight_cache`, else the environment variable, else
    `glm_multiuser` in `$XDG_CACHE_HOME` or `~/.cache`; None if it is "off".

    Raises:
        ConfigError: not a valid path.
    """
    folder = setting or os.environ.get(VARIABLE)
    if folder == OFF:
        return None
    if folder:
        return folder_of("weight_cache" if setting else VARIABLE, folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "glm_multiuser")


@dataclass(frozen=True)
class WeightCache:
    """The cache file of one checkpoint with one type of weights.

    Attributes:
        path: of the file.
        made_from: everything that its content depends on, as JSON.
        sizes: of its arrays, in file order.
    """

    path: Path
    made_from: str
    sizes: Sizes

    @classmethod
    def of(
        cls, folder: Path, files: Sequence[Path], settings: Mapping[str, Any], sizes: Sizes
    ) -> WeightCache:
        """Returns the cache for a checkpoint's files in their current state.

        Args:
            folder: of the cache.
            files: of the checkpoint.
            settings: what else the content depends on; the file's name has only `weight_dtype`.
            sizes: of the arrays.

        Raises:
            OSError: the state of a file cannot be read.
        """
        paths = [path.resolve() for path in files]
        states = [(str(path), *_state(path.stat())) for path in paths]
        made_from = {"format": FORMAT, "files": states, **settings}
        text = json.dumps(made_from, sort_keys=True)
        # One name for all states of the same files and all versions: a new one replaces the last.
        place = json.dumps([[str(path) for path in paths], settings["weight_dtype"]])
        name = paths[0].stem if len(paths) == 1 else paths[0].parent.name
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        # Matrices fill whole cache lines. Vectors may not, and come last to keep all aligned.
        order = sorted(sizes, key=lambda one: len(sizes[one][0]) == 1)
        ordered = {one: sizes[one] for one in order}
        return cls(folder / f"{name}-{digest}.safetensors", text, ordered)

    def load(self, progress: Progress) -> Optional[dict[str, Array]]:
        """Maps the arrays from the file; None if it is missing, outdated or damaged."""
        try:
            with self.path.open("rb") as file:
                found = self._mapped(file.fileno(), progress)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("packed weights are made anew: %s: %s", self.path, error)
            return None
        logger.info("packed weights are mapped from %s", self.path)
        return found

    def _mapped(self, file: int, progress: Progress) -> dict[str, Array]:
        size = os.fstat(file).st_size
        begin = 8 + int.from_bytes(os.pread(file, 8, 0), "little")
        if begin > min(size, LARGEST_HEADER):
            raise ValueError("it is cut short or no safetensors file")
        header = json.loads(os.pread(file, begin - 8, 8))
        digests = _digests(header)
        if header != json.loads(self._header(digests)):
            raise ValueError("it was made from other files or by another version, or is damaged")
        if size != begin + sum(byte_size(*one) for one in self.sizes.values()):
            raise ValueError("it is cut short")
        # Private, so that this process cannot change the file.
        memory = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        advise_huge_pages(memory, True)
        arrays, end = {}, begin
        for name, (shape, dtype) in self.sizes.items():
            flat = np.frombuffer(memory, dtype, math.prod(shape), end)
            arrays[name] = flat.reshape(shape)
            end += flat.nbytes
        done = 0
        with ThreadPoolExecutor(cores()) as pool:
            found = pool.map(xxhash.xxh3_64_hexdigest, map(_content, arrays.values()))
            for name, digest in zip(arrays, found):
                progress(done // MIB, -(-size // MIB), "MiB of packed weights")
                if digest != digests[name]:
                    raise ValueError(f"{name} is damaged")
                done += arrays[name].nbytes
        return arrays

    def save(self, arrays: Mapping[str, Array]) -> None:
        """Writes the file atomically. Logs a warning if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_remains()
            handle, name = mkstemp(".part", f".{self.path.stem}-", self.path.parent)
            with os.fdopen(handle, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # see `_remove_remains`
                try:
                    self._write(file.fileno(), arrays)
                    os.replace(name, self.path)
                except BaseException:
                    os.unlink(name)
                    raise
        except OSError as error:
            logger.warning("packed weights are not kept: %s: %s", self.path.parent, error)
            return
        logger.info("packed weights are kept in %s", self.path)

    def _write(self, file: int, arrays: Mapping[str, Array]) -> None:
        contents = [_content(arrays[name]) for name in self.sizes]
        with ThreadPoolExecutor(cores()) as pool:
            digests = dict(zip(self.sizes, pool.map(xxhash.xxh3_64_hexdigest, contents)))
        header = self._header(digests)
        left = [memoryview(len(header).to_bytes(8, "little")), memoryview(header), *contents]
        place = 0
        while left:
            # In large aligned writes, which the system can keep in huge pages.
            written = os.pwritev(file, left[:MOST_BUFFERS], place)
            place += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]

    def _remove_remains(self) -> None:
        """Removes partial files of processes that exited while writing: they are not locked."""
        for remains in self.path.parent.glob(".*.part"):
            if not REMAINS.fullmatch(remains.name):
                continue
            try:
                with remains.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remains.unlink(missing_ok=True)
            except OSError as error:  # locked, renamed or owned by another process
                logger.debug("%s is left where it is: %s", remains, error)

    def _header(self, digests: Mapping[str, str]) -> bytes:
        checks = {f"{CHECKSUM}{name}": digests.get(name, "") for name in self.sizes}
        header: dict[str, Any] = {"__metadata__": {"made_from": self.made_from, **checks}}
        end = 0
        for name, (shape, dtype) in self.sizes.items():
            begin, end = end, end + byte_size(shape, dtype)
            stored_as = DTYPES[dtype.newbyteorder("<").str]
            header[name] = {"dtype": stored_as, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # Aligns the tensors to a page.
        return text + b" " * (-(len(text) + 8) % mmap.PAGESIZE)


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Attributes that change with the file; unlike mtime, ctime cannot be set back."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _digests(header: Any) -> dict[str, str]:
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return {
        name[len(CHECKSUM) :]: digest
        for name, digest in (found if isinstance(found, dict) else {}).items()
        if name.startswith(CHECKSUM)
    }


def _content(values: Array) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
