"""The compiled library: whether it is there, and how it is set up.

It has a thread pool of its own. MindSpore's threads and those of OpenMP fight for the cores when
either spins, and how OpenMP waits is decided by whoever loads it first; here a helper looks out for
more work for some microseconds, the time between two operators, and then sleeps.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import ConfigError

PATH = Path(__file__).with_name("native.so")

SWITCH = "GLM_MULTIUSER_KERNELS"
"""Environment variable: 0 switches the kernels off for `kernels="auto"`."""

LEVEL = "GLM_MULTIUSER_KERNELS_LEVEL"
"""Environment variable: the instructions to use, one of `LEVELS`; default: the best there are."""

THREADS = "GLM_MULTIUSER_THREADS"
"""Environment variable: threads of the kernels; default: the cores that this process may use."""

LEVELS = ("avx512bf16", "avx512", "avx2", "plain")


def why_not(device_target: str) -> str:
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


def portable_by_choice(kernels: str, dtype: str) -> str:
    """Which setting rules the kernels out; "" if none does.

    Args:
        kernels: "auto", "native" or "portable", as in `EngineConfig`.
        dtype: that the model computes in.
    """
    if kernels == "portable":
        return "kernels is 'portable'"
    if dtype != "float32":
        return f"they compute in float32, not in {dtype}"
    if kernels == "auto" and os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    return ""


def check_not_needed(kernels: str, weight_dtype: Optional[str], dtype: str, reason: str) -> None:
    """Refuses what only the kernels can do, where they are not used for a reason.

    Args:
        kernels: as in `EngineConfig`; `weight_dtype` too.
        weight_dtype: of the matrices; None: `dtype`.
        dtype: that the model computes in.
        reason: why they are not used, as `portable_by_choice` and `why_not` say it.

    Raises:
        ConfigError: they are asked for, or weights of a type that only they can compute with.
    """
    if kernels == "native":
        raise ConfigError(f"kernels is 'native', but {reason}")
    if weight_dtype not in (None, dtype):
        raise ConfigError(f"weight_dtype {weight_dtype!r} needs native kernels, but {reason}")


def path() -> Path:
    """Where the library is, set up for use.

    Raises:
        OSError: it cannot be loaded.
        ConfigError: an environment variable with a value that means nothing here.
    """
    open_library()
    return PATH


@functools.lru_cache(maxsize=1)
def open_library() -> ctypes.CDLL:
    """Loads the library, once per process, with as many threads as this process may use."""
    library = ctypes.CDLL(str(PATH))
    library.glm_level.restype = ctypes.c_char_p
    library.glm_force_level.argtypes = [ctypes.c_char_p]
    force_level(library, os.environ.get(LEVEL, ""))
    library.glm_set_threads(_wanted_threads())
    return library


def force_level(library: ctypes.CDLL, name: str) -> None:
    """Chooses the instructions to use, "" for the best.

    Raises:
        ConfigError: this processor, or this build, has no such level.
    """
    if not library.glm_force_level(name.encode()):
        raise ConfigError(
            f"{LEVEL} is {name!r}; it must be one of {', '.join(LEVELS)}, and one that this "
            f"{platform.machine()} processor has"
        )


def level() -> str:
    """The instructions in use, one of `LEVELS`."""
    name: bytes = open_library().glm_level()
    return name.decode()


def _wanted_threads() -> int:
    wanted = os.environ.get(THREADS, "")
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not wanted.isdecimal() or not 1 <= int(wanted) <= 1024:
        raise ConfigError(f"{THREADS} is {wanted!r}; it must be a whole number from 1 to 1024")
    return int(wanted)
