"""Loads and configures the compiled library."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Optional

from glm_multiuser.device import cores
from glm_multiuser.errors import ConfigError

PATH = Path(__file__).with_name("native.so")

SWITCH = "GLM_MULTIUSER_KERNELS"
"""Environment variable: 0 disables the kernels for `kernels="auto"`."""

LEVEL = "GLM_MULTIUSER_KERNELS_LEVEL"
"""Environment variable: instruction set, one of `LEVELS`; default: the best available."""

THREADS = "GLM_MULTIUSER_THREADS"
"""Environment variable: number of threads; default: the cores that this process may use."""

LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "plain")
"""Best first."""


def unavailable_reason(device_target: str) -> str:
    """Why the kernels cannot be used for this device; "" if they can."""
    if device_target != "CPU":
        return f"they are for the CPU, not for {device_target}"
    if not PATH.exists():
        return "they were not built; that needs a C++17 compiler when the package is installed"
    try:
        open_library()
    except OSError as error:
        return f"the library does not load: {error}"
    return ""


def path() -> Path:
    """Path of the library, after loading and configuring it; raises as `open_library` does."""
    open_library()
    return PATH


@functools.lru_cache(maxsize=1)
def open_library() -> ctypes.CDLL:
    """Loads and configures the library, once per process.

    Raises:
        OSError: it cannot be loaded, or lacks a function.
        ConfigError: an environment variable has an invalid value.
    """
    library = ctypes.CDLL(str(PATH))
    try:
        _declare(library)
    except AttributeError as error:
        raise OSError(
            f"{PATH.name} was built from sources of another version ({error}); build it again: "
            "python -m glm_multiuser.backends.native.compiler"
        ) from error
    name = os.environ.get(LEVEL, "")
    if not library.glm_force_level(name.encode()):
        raise ConfigError(
            f"{LEVEL} is {name!r}; it must be one of {', '.join(LEVELS)}, and one that this "
            f"{platform.machine()} processor has, its system allows, and {PATH.name} was built for"
        )
    library.glm_set_threads(_wanted_threads())
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.glm_level.restype = ctypes.c_char_p
    library.glm_force_level.argtypes = [ctypes.c_char_p]
    number, size, memory = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.glm_pack.argtypes = [number, number, memory, size, size, memory]
    library.glm_kernel_number.argtypes = [ctypes.c_char_p]
    declare_row_bytes(library)
    library.glm_capture.restype = memory
    library.glm_replay.argtypes = library.glm_forget.argtypes = [memory]


def level() -> str:
    """The instruction set in use, one of `LEVELS`."""
    name: bytes = open_library().glm_level()
    return name.decode()


def kernel_number(name: str) -> int:
    """The number of a kernel in instructions of a program.

    Raises:
        KeyError: the library has no such kernel.
    """
    number: int = open_library().glm_kernel_number(name.encode())
    if number < 0:
        raise KeyError(f"{PATH.name} has no kernel {name!r}")
    return number


def declare_row_bytes(library: ctypes.CDLL) -> None:
    """Declares the types of the function that `row_bytes` calls."""
    size, text = ctypes.c_int64, ctypes.c_char_p
    sizes = ctypes.POINTER(size)
    library.glm_row_bytes.argtypes = [text, ctypes.c_int, sizes, size, text]
    library.glm_row_bytes.restype = size


def row_bytes(
    dtype: str,
    shape: tuple[int, ...],
    inputs: int,
    rounded_to: str,
    library: Optional[ctypes.CDLL] = None,
) -> int:
    """Bytes of a packed input row of a product.

    Args:
        dtype: of the packed weight.
        shape: of the packed weight.
        inputs: length of a row.
        rounded_to: the type of inputs, "float32", "bfloat16" or "int8".
        library: default: that of `open_library`.

    Raises:
        ValueError: there is no such product.
    """
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    names = dtype.encode(), rounded_to.encode()
    opened = library or open_library()
    found: int = opened.glm_row_bytes(names[0], len(shape), sizes, inputs, names[1])
    if found == 0:
        raise ValueError(f"no product takes {inputs} {rounded_to} inputs of a {dtype} {shape}")
    return found


def row_multiple() -> int:
    """The memory of packed inputs is padded to a multiple of this many rows."""
    multiple: int = open_library().glm_row_multiple()
    return multiple


def _wanted_threads() -> int:
    wanted = os.environ.get(THREADS, "")
    if not wanted:
        return cores()
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 1024:
        raise ConfigError(f"{THREADS} is {wanted!r}; it must be a whole number from 1 to 1024")
    return int(wanted)
