"""Builds the C++ sources in `cpu/`. It is called during installation, when dependencies are not
installed yet, so it needs the standard library only. `python -m
glm_multiuser.backends.native.compiler` builds them in place for this processor."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Optional

from glm_multiuser.backends.native.library import PATH

SOURCES = Path(__file__).with_name("cpu")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra"]
# GCC's own headers trigger the last two.
FLAGS += ["-Wno-unused-parameter", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# Compilers might contract products and sums in a loop over several rows but not over a single row,
# so they must not do it at all; kernels use FMA explicitly.
FLAGS += ["-ffp-contract=off"]
# A wheel may be loaded on a system with an older libstdc++. Unused parts are removed, because some
# require a recent glibc. A static libgcc would as well; the shared one is compatible and always
# present.
STATIC = ["-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]
# A compiler for C, such as gcc, would link a library without libstdc++, which does not load.
COMPLETE = ["-Wl,-z,defs"] if sys.platform.startswith("linux") else []

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
AVX512_BF16 = [*AVX512, "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"]
LEVEL_FLAGS: dict[str, list[str]] = {
    "plain": [],
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, "-mavx512vnni"],
    "avx512bf16": AVX512_BF16,
    "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


class BuildError(Exception):
    """There is no compiler, or it failed."""


def is_up_to_date(target: Path) -> bool:
    """Whether there is a library that is newer than all of its sources."""
    sources = [*SOURCES.glob("*.[ch]pp"), Path(__file__)]
    newest = max(one.stat().st_mtime_ns for one in sources)
    return target.exists() and target.stat().st_mtime_ns > newest


def levels_here() -> list[str]:
    """The levels that this machine's processor supports, according to the compiler.

    Raises:
        BuildError: there is no compiler.
    """
    macros = partial(_predefined_macros, _compiler())
    always, here = macros([]), macros(["-march=native"])
    return [name for name, flags in LEVEL_FLAGS.items() if macros(flags) - always <= here]


def build_here() -> None:
    """Builds the library of a checkout for this machine's processor, unless it is up to date.
    Waits while another process does the same.

    Raises:
        BuildError: the build failed; an existing library is unchanged.
    """
    lock = os.open(SOURCES, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_up_to_date(PATH):
            build(PATH, levels=levels_here())
    finally:
        os.close(lock)


def build(target: Path, extra: Sequence[str] = (), levels: Optional[Sequence[str]] = None) -> None:
    """Builds the library at `target`.

    Args:
        extra: flags after `FLAGS` and before those of a level.
        levels: of `LEVEL_FLAGS`; default: all. Those that the compiler lacks are skipped.

    Raises:
        BuildError: the build failed; an existing library is unchanged.
    """
    started = time.time_ns()
    compiler = _compiler()
    wanted = LEVEL_FLAGS if levels is None else levels
    levels = [name for name in wanted if _supports(compiler, LEVEL_FLAGS[name])]
    have = [f"-DHAVE_{name}" for name in levels]
    # If there are other levels, `plain` is for tests and for processors from before 2013.
    quick = {"level_plain": ["-O1"]} if len(levels) > 1 else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: str, name: str, flags: Sequence[str]) -> str:
            made = str(Path(folder, f"{name}.o"))
            flags = [*FLAGS, *quick.get(name, []), *extra, *flags]
            _run([*compiler, *flags, "-c", str(SOURCES / source), "-o", made])
            return made

        pieces = [
            ("level_body.cpp", f"level_{n}", [*LEVEL_FLAGS[n], f"-DLEVEL={n}"]) for n in levels
        ]
        once = sorted(path.stem for path in SOURCES.glob("*.cpp") if path.stem != "level_body")
        pieces += [(f"{name}.cpp", name, have) for name in once]
        objects = list(pool.map(lambda piece: compiled(*piece), pieces))
        linked = target.with_name(f"{target.name}.new")
        link = [*compiler, *FLAGS, *extra, *COMPLETE, "-shared", *objects, "-o", str(linked)]
        try:
            _run([*link, *STATIC])
        except BuildError:  # some systems package the static libstdc++ separately
            _run(link)
    # A source that was saved meanwhile is newer.
    os.utime(linked, ns=(started, started))
    # Not written in place, which would crash processes that use the old library.
    linked.replace(target)


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "")
    try:
        wanted = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"no C++ compiler: CXX is {named!r}: {error}") from error
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler: {' '.join(wanted) or 'c++, g++, clang++'} not found")


def _supports(compiler: list[str], flags: Sequence[str]) -> bool:
    """Whether the compiler supports these instructions: an old one lacks the newest, and all lack
    those of other architectures. Some only warn of that; they also warn of an option for linking in
    CXX, with these flags and without."""

    def checked(some: Sequence[str]) -> tuple[int, bytes]:
        command = [*compiler, *some, "-x", "c++", "-fsyntax-only", os.devnull]
        result = subprocess.run(command, capture_output=True)
        return result.returncode, result.stderr

    return not flags or checked(flags) == (0, checked([])[1])


def _predefined_macros(compiler: list[str], flags: Sequence[str]) -> set[str]:
    """Names of the macros that these flags define, which include one for each instruction set."""
    command = [*compiler, *flags, "-x", "c++", "-dM", "-E", os.devnull]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[1] for line in lines}


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stderr}")


if __name__ == "__main__":
    try:
        build_here()
    except BuildError as error:
        raise SystemExit(f"The kernels are not built: {error}") from None
