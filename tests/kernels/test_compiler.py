"""The build: what it does without a compiler, with an old one, and with sources that are wrong."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import BuildError, build, is_up_to_date

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no C++ compiler"
)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: c\+\+, g\+\+, clang\+\+ not found"):
        build(tmp_path / "native.so")


@needs_compiler
def test_a_compiler_that_lacks_the_newest_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old compiler"
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) exit 1;; esac\nexec {real} "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(old)))
    flags = {name: compiler.LEVEL_FLAGS[name] for name in ("plain", "avx512", "avx512bf16")}
    monkeypatch.setattr(compiler, "LEVEL_FLAGS", flags)
    build(tmp_path / "native.so", ["-O0"])
    library = ctypes.CDLL(str(tmp_path / "native.so"))
    assert library.glm_force_level(b"plain") == 1
    assert library.glm_force_level(b"avx512") == 0
    assert library.glm_force_level(b"avx512bf16") == 0


@needs_compiler
def test_sources_that_are_wrong_leave_the_old_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "cpu"
    shutil.copytree(compiler.SOURCES, sources)
    (sources / "pool.cpp").write_text("#error this is wrong\n")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "LEVEL_FLAGS", {"plain": []})
    target = tmp_path / "native.so"
    target.write_text("old")
    with pytest.raises(BuildError, match="this is wrong"):
        build(target, ["-O0"])
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu", "native.so"]


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
