"""Memory that costs nothing until it is written to, and goes back to the system by whole pages.

It is a private anonymous mapping (mmap(2)): the system brings a page of zeros at the first write,
and takes it back after MADV_DONTNEED (madvise(2)). Only Linux promises both. Elsewhere all of it is
kept from beginning to end.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

UNAVAILABLE = "" if sys.platform == "linux" else "pages can be given back on Linux only"
"""Why everything is kept; "" if it is not."""

SIZE = 1 if UNAVAILABLE else mmap.PAGESIZE
"""Bytes of a page; 1 where there are none to give back."""

MAP_NORESERVE = 0x4000
"""Of Linux on x86 and ARM; Python names it from 3.13 on."""


def whole_pages(size: int) -> int:
    """`size`, rounded up to bytes of whole pages."""
    return -(-size // SIZE) * SIZE


class PagedArray:
    """An array of zeros whose pages are taken and given back.

    Args:
        shape: [rows, parts, ...]; where pages are given back, the bytes of a part must be a
            multiple of `SIZE`, so that no page has numbers of two parts.
        dtype: of its numbers.

    Attributes:
        array: the memory itself.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        if UNAVAILABLE:
            self.array: NDArray[Any] = np.zeros(shape, dtype)
            return
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # Without MAP_NORESERVE the system may refuse more than it has, used or not.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, size, flags=flags)
        try:
            # Or the first number of 2 MB would cost 2 MB.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a system without huge pages
                raise
        self.array = np.frombuffer(self._map, dtype).reshape(shape)

    def trim(self, row: int, size: int) -> None:
        """Gives back the pages of `array[row]` after the first `size` bytes of each of its parts;
        they are zero from then on."""
        whole, part = self.array.strides[:2]
        kept, start = whole_pages(size), row * whole
        if kept == 0:
            self._give_back(start, whole)
        elif kept < part:
            for at in range(start, start + whole, part):
                self._give_back(at + kept, part - kept)

    def give_back(self) -> None:
        """Gives back all pages."""
        self._give_back(0, self.array.nbytes)

    def _give_back(self, start: int, size: int) -> None:
        if UNAVAILABLE:
            return
        try:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)
        except OSError as error:  # locked memory, for example; it can be used all the same
            warn_once(f"memory of KV caches stays in use, because the system refuses it: {error}")


@functools.cache
def warn_once(text: str) -> None:
    logger.warning("%s", text)
