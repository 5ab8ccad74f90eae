"""The compiled library: which other libraries it needs."""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import build
from tests.kernels.quick_sources import names_of_levels

NEEDED = b"libstdc++.so"


@pytest.fixture(autouse=True)
def gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its path. The library is compiled for one level, of which there is nothing but its name."""
    found = shutil.which("g++")
    if not found:
        pytest.skip("there is no g++")
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(compiler, "LEVEL_FLAGS", {"plain": []})
    monkeypatch.setattr(compiler, "SOURCES", names_of_levels(tmp_path))
    return found


def test_the_library_needs_no_libstdcxx(tmp_path: Path) -> None:
    command = ["g++", "-print-file-name=libstdc++.a"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("there is no static libstdc++")
    build(tmp_path / "native.so", ["-O0"])
    assert NEEDED not in (tmp_path / "native.so").read_bytes()
    assert ctypes.CDLL(str(tmp_path / "native.so")).glm_force_level(b"plain") == 1


def test_without_a_static_libstdcxx_the_shared_one_is_linked(
    gcc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = tmp_path / "lacking"
    lacking.write_text(f'#!/bin/sh\ncase "$*" in *-static*) exit 1;; esac\nexec {gcc} "$@"\n')
    lacking.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(lacking)))
    build(tmp_path / "native.so", ["-O0"])
    assert NEEDED in (tmp_path / "native.so").read_bytes()
    assert ctypes.CDLL(str(tmp_path / "native.so")).glm_force_level(b"plain") == 1
