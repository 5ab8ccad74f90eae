"""The build without a compiler, with an old one, and with broken sources."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import (
    LEVEL_FLAGS,
    BuildError,
    build,
    is_up_to_date,
    levels_here,
)
from glm_multiuser.backends.native.library import LEVELS
from tests.kernels.quick_sources import names_of_levels

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = names_of_levels(tmp_path)
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ not found"):
        build(tmp_path / "native.so")


def test_a_name_whose_quotes_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/opt/o'neill/g++")
    with pytest.raises(BuildError, match=r"CXX is \"/opt/o'neill/g\+\+\": No closing quotation"):
        levels_here()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere linkers refuse it")
def test_a_compiler_for_c(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles C++, too, but the library would not load."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    monkeypatch.setenv("CXX", "gcc")
    target = tmp_path / "native.so"
    with pytest.raises(BuildError, match="gcc"):
        build(target, ["-O0"], ["plain"])
    assert not target.exists()


@needs_compiler
def test_a_compiler_that_lacks_the_newest_instructions(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old compiler"
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(old)))
    assert not any("avx512" in name or name == "amx" for name in levels_of(tmp_path, LEVEL_FLAGS))


def compiler_that_warns(script: Path, of: str) -> str:
    """The compiler, which warns if an argument has this pattern; for `CXX`."""
    real, warning = shlex.join(compiler._compiler()), "echo unused >&2; [ $1 != -Werror ] || exit 1"
    script.write_text(f'#!/bin/sh\ncase "$*" in {of}) {warning};; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_a_compiler_that_warns_of_an_option_in_cxx(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clang does, of one for linking, such as `-fuse-ld=lld`, wherever it links nothing."""
    usual, other = tmp_path / "usual", tmp_path / "other"
    usual.mkdir()
    other.mkdir()
    here = levels_of(usual, levels_here())
    monkeypatch.setenv("CXX", compiler_that_warns(tmp_path / "clang", "*"))
    assert levels_of(other, levels_here()) == here


@needs_compiler
def test_a_compiler_that_only_warns_of_instructions(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_that_warns(tmp_path / "clang", "*-mavx*"))
    assert levels_of(tmp_path, LEVEL_FLAGS) == {"plain"}


@needs_compiler
def test_levels_that_this_processor_runs(sources: Path, tmp_path: Path) -> None:
    here = levels_here()
    found = levels_of(tmp_path, here)
    assert levels_of(tmp_path, LEVEL_FLAGS) == found
    assert "plain" in found
    assert found <= {*here}  # the system may not allow all that the processor has


def levels_of(folder: Path, wanted: Iterable[str]) -> set[str]:
    """Those that a library has that is built of `wanted`, and that run here."""
    path = folder / f"{'_'.join(wanted)}.so"
    build(path, ["-O0"], [*wanted])
    library = ctypes.CDLL(str(path))
    return {name for name in LEVELS if library.glm_force_level(name.encode())}


# The last of a kind has nearly all that others have.
OFTEN = ("avx2", "amx")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [OFTEN, pytest.param({*LEVEL_FLAGS} - {*OFTEN}, marks=pytest.mark.rare)]
)
def test_levels_that_are_not_for_this_processor_compile(
    names: Collection[str], tmp_path: Path
) -> None:
    others = [name for name in LEVEL_FLAGS if name in names and name not in levels_here()]
    build(tmp_path / "native.so", ["-O0"], ["plain", *others])


@needs_compiler
def test_sources_that_are_wrong_leave_the_old_library(sources: Path, tmp_path: Path) -> None:
    (sources / "pool.cpp").write_text("#error this is wrong\n")
    target = tmp_path / "native.so"
    target.write_text("old")
    with pytest.raises(BuildError, match="this is wrong"):
        build(target, ["-O0"], ["plain"])
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu", "native.so"]


@needs_compiler
def test_of_several_processes_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make compiles while pip downloads, and what pip builds finds the library there."""
    built = []

    def stub(target: Path, levels: Sequence[str]) -> None:
        lock = os.open(compiler.SOURCES, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        target.touch()
        built.append(levels)

    monkeypatch.setattr(compiler, "PATH", tmp_path / "native.so")
    monkeypatch.setattr(compiler, "build", stub)
    compiler.build_here()
    compiler.build_here()
    assert built == [levels_here()]


def test_a_library_is_up_to_date_until_something_that_it_is_built_from_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    source, header = tmp_path / "pool.cpp", tmp_path / "pool.hpp"
    target = tmp_path / "native.so"
    for file in (source, header):
        file.touch()
    assert not is_up_to_date(target)
    target.touch()
    latest = Path(compiler.__file__).stat().st_mtime_ns + 10**9
    for file, time in ((source, 1), (header, 1), (target, 2)):
        os.utime(file, ns=(latest + time, latest + time))
    assert is_up_to_date(target)
    os.utime(header, ns=(latest + 2, latest + 2))
    assert not is_up_to_date(target)
    os.utime(header, ns=(1, 1))
    os.utime(target, ns=(latest - 10**9, latest - 10**9))
    assert not is_up_to_date(target), "the flags are in the file that builds it"


@needs_compiler
def test_a_source_that_is_saved_during_a_build_is_built_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, target = compiler._run, tmp_path / "native.so"

    def run_and_save(command: list[str]) -> None:
        compiled(command)
        if "-shared" in command:
            next(sources.glob("*.cpp")).touch()

    build(target, levels=["plain"])
    assert is_up_to_date(target)
    monkeypatch.setattr(compiler, "_run", run_and_save)
    build(target, levels=["plain"])
    assert not is_up_to_date(target)
