"""Memory that is allocated on first write, and returned to the system in whole pages.

It is a private anonymous mapping (mmap(2)): the system provides a page of zeros on the first write,
and frees it on MADV_DONTNEED (madvise(2)). Only Linux guarantees both. Elsewhere, memory is
allocated at once and kept.

Preallocated memory is in huge pages, whose addresses are translated faster, and stays until all of
it is returned.
"""

from __future__ import annotations

import functools
import logging
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.huge_pages import advise_huge_pages

logger = logging.getLogger(__name__)

UNAVAILABLE = "" if sys.platform == "linux" else "pages can be returned on Linux only"
"""Why pages cannot be returned; "" if they can."""

SIZE = 1 if UNAVAILABLE else mmap.PAGESIZE
"""Bytes of a page; 1 if pages cannot be returned."""

MAP_NORESERVE = 0x4000
"""On Linux, x86 and ARM; `mmap` defines it since Python 3.13."""


def whole_pages(size: int) -> int:
    """`size` in bytes, rounded up to whole pages."""
    return -(-size // SIZE) * SIZE


class PagedArray:
    """An array of zeros whose pages can be returned to the system.

    Args:
        shape: [rows, parts, ...]; the bytes of a part must be a multiple of `SIZE`, so that parts
            do not share pages.
        dtype: of the array.
        preallocated: whether `allocate` is called before use, and `trim` has no effect.

    Attributes:
        array: the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, preallocated: bool = False) -> None:
        self._preallocated = preallocated
        if UNAVAILABLE:
            self.array: NDArray[Any] = np.zeros(shape, dtype)
            return
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Without MAP_NORESERVE, the system may refuse to map more than its physical memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, size, flags=flags)
        # Where memory is not allocated at once, a huge page would take 2 MB with the first write.
        advise_huge_pages(self._map, preallocated)
        self.array = np.frombuffer(self._map, dtype).reshape(shape)

    def allocate(self) -> None:
        """Allocates all pages."""
        self.array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0

    def trim(self, row: int, size: int) -> None:
        """Returns the pages of `array[row]` after the first `size` bytes of each of its parts; they
        become zero."""
        if self._preallocated:
            return
        whole, part = self.array.strides[:2]
        kept, start = whole_pages(size), row * whole
        if kept == 0:
            self._give_back(start, whole)
        elif kept < part:
            for at in range(start, start + whole, part):
                self._give_back(at + kept, part - kept)

    def give_back(self) -> None:
        """Returns all pages."""
        self._give_back(0, self.array.nbytes)

    def _give_back(self, start: int, size: int) -> None:
        if UNAVAILABLE:
            return
        try:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)
        except OSError as error:  # locked memory, for example; it remains usable
            warn_once(f"memory of KV caches stays in use, because the system refuses it: {error}")


@functools.cache
def warn_once(text: str) -> None:
    logger.warning("%s", text)
