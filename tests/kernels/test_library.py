"""Opening the library: its environment variables, and behaviour without it."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.backends.native import library
from glm_multiuser.backends.native.library import LEVELS

SAY = "from glm_multiuser.backends.native import library; print({}, end='')"


def child(expression: str, **environment: str) -> str:
    """What it is in a new process; the last line of what went wrong if something does."""
    variables = {**os.environ, **environment}
    for name in {library.LEVEL, library.THREADS} - set(environment):
        variables.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-c", SAY.format(expression)],
        env=variables,
        capture_output=True,
        text=True,
    )
    return result.stdout if result.returncode == 0 else result.stderr.splitlines()[-1]


pytestmark = pytest.mark.usefixtures("kernels")

THREADS_IN_USE = "library.open_library().glm_threads()"
NOT_A_NUMBER = "must be a whole number from 1 to 1024"


def test_it_can_be_used_on_the_cpu() -> None:
    assert child("library.unavailable_reason('CPU')") == ""
    assert child("library.path() == library.PATH") == "True"


def test_it_cannot_be_used_elsewhere() -> None:
    assert "not for Ascend" in library.unavailable_reason("Ascend")


def test_mindspore_is_not_imported() -> None:
    modules = "__import__('glm_multiuser.backends.native.packing') and library.level() and "
    modules += "[name for name in __import__('sys').modules if name.startswith('mindspore')]"
    assert child(modules) == "[]"


@pytest.mark.parametrize("name", LEVELS)
def test_level_of_the_environment(name: str, best_level: ctypes.CDLL) -> None:
    if not best_level.glm_force_level(name.encode()):
        pytest.skip(f"this processor, or this build, has no {name}")
    assert child("library.level()", **{library.LEVEL: name}) == name


@pytest.mark.parametrize("name", ["avx9000", "AVX2", "plain "])
def test_unknown_level(name: str) -> None:
    said = child("library.level()", **{library.LEVEL: name})
    assert said.startswith("glm_multiuser.errors.ConfigError: ")
    assert f"{library.LEVEL} is {name!r}" in said
    assert ", ".join(LEVELS) in said


@pytest.mark.parametrize("count", ["1", "3", "1024"])
def test_threads_of_the_environment(count: str) -> None:
    assert child(THREADS_IN_USE, **{library.THREADS: count}) == count


@pytest.mark.parametrize("count", ["0", "-1", "1025", "two", "1.5", " 2", "²"])
def test_numbers_of_threads_that_are_none(count: str) -> None:
    said = child(THREADS_IN_USE, **{library.THREADS: count})
    assert said.startswith("glm_multiuser.errors.ConfigError: ")
    assert f"{library.THREADS} is {count!r}; it {NOT_A_NUMBER}" in said


def test_threads_are_as_many_as_the_process_may_use() -> None:
    assert child(THREADS_IN_USE) == str(len(os.sched_getaffinity(0)))
    one_core = "__import__('os').sched_setaffinity(0, {min(__import__('os').sched_getaffinity(0))})"
    assert child(f"{one_core} or {THREADS_IN_USE}") == "1"


@pytest.fixture
def other_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "PATH", tmp_path / "native.so")
    monkeypatch.setattr(library, "open_library", library.open_library.__wrapped__)
    return tmp_path / "native.so"


@pytest.mark.usefixtures("other_path")
def test_it_was_not_built() -> None:
    assert "were not built" in library.unavailable_reason("CPU")


def test_it_does_not_load(other_path: Path) -> None:
    other_path.write_bytes(b"no library")
    assert "does not load" in library.unavailable_reason("CPU")


def test_it_is_of_another_version(other_path: Path) -> None:
    other_path.symlink_to(_ctypes.__file__)
    assert "sources of another version" in library.unavailable_reason("CPU")
