"""Calls an operator as MindSpore does, with numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from glm_multiuser.backends.native import library
from tests.kernels.memory import placed

PATH = Path(os.environ.get("GLM_MULTIUSER_TEST_LIBRARY", library.PATH))

PROPERTY = settings(
    max_examples=int(os.environ.get("GLM_MULTIUSER_TEST_EXAMPLES", "12")), deadline=None
)


@functools.lru_cache(maxsize=1)
def native() -> ctypes.CDLL:
    if PATH == library.PATH:
        library.open_library()  # now: the first time, it sets the level
    opened = ctypes.CDLL(str(PATH))
    opened.glm_level.restype = ctypes.c_char_p
    opened.glm_force_level.argtypes = [ctypes.c_char_p]
    library.declare_row_bytes(opened)
    return opened


def levels_here() -> list[str]:
    """Levels supported by this processor and the library, best first; activates the best."""
    found = [name for name in library.LEVELS if native().glm_force_level(name.encode())]
    native().glm_force_level(b"")
    return found


def call(name: str, *arrays: NDArray[Any]) -> int:
    """Calls an operator with inputs, then outputs, in place; returns 0, or the rejecting line."""
    count = len(arrays)
    shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
    pointer = ctypes.POINTER(ctypes.c_int64)
    code: int = getattr(native(), name)(
        count,
        (ctypes.c_void_p * count)(*[array.ctypes.data for array in arrays]),
        (ctypes.c_int * count)(*[array.ndim for array in arrays]),
        (pointer * count)(*[ctypes.cast(shape, pointer) for shape in shapes]),
        (ctypes.c_char_p * count)(*[str(array.dtype).encode() for array in arrays]),
        None,
        None,
    )
    return code


def run(name: str, *inputs: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns one float32 output of `shape`; unwritten elements stay NaN."""
    output = placed(np.full(shape, np.nan, np.float32))
    code = call(name, *[placed(each) for each in inputs], output)
    assert code == 0, f"{name} refused its arguments in line {code} of its source"
    return output


def number(value: float, dtype: Any = np.int32) -> NDArray[Any]:
    """A tensor [1], for `used`, factors and epsilons."""
    return np.array([value], dtype)


def bits(array: NDArray[Any]) -> bytes:
    """Raw bytes, for bitwise comparison."""
    return np.ascontiguousarray(array).tobytes()
