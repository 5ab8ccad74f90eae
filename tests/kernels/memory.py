"""Arrays that end at the end of mapped memory, so out-of-bounds reads fail.

They are therefore aligned only to their element size, not to 64 bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_ACCESS = 0

SANITIZED = "GLM_MULTIUSER_TEST_SANITIZED" in os.environ
"""AddressSanitizer only knows the bounds of normally allocated memory."""


def placed(array: Any, announced: Optional[tuple[int, ...]] = None) -> NDArray[Any]:
    """A copy at the end of its memory, which may claim a larger shape: `announced`."""
    array = np.ascontiguousarray(array)
    if SANITIZED:
        copy = array.copy()
    else:
        size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size + mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if LIBC.mprotect(begin + size, mmap.PAGESIZE, NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
        copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes)
        copy = copy.reshape(array.shape)
        copy[...] = array
    if announced is None:
        return copy
    strides = np.empty(announced[1:], array.dtype)[None].strides
    return np.lib.stride_tricks.as_strided(copy, announced, strides)
