"""Runs the other operator tests with a library built with AddressSanitizer and UBSan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler, library
from glm_multiuser.backends.native.compiler import BuildError, build

HERE = Path(__file__).parent
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
# Compiling takes as long as the tests, and a third longer with "-g1", which would tell lines, too.
FLAGS += ["-D_GLIBCXX_SANITIZE_VECTOR", "-O0"]
# Checks of every pointer take a third of the time, and AddressSanitizer finds most of the same.
WITHOUT_POINTERS = ["-fno-sanitize=null,object-size,alignment,pointer-overflow"]
WATCHED: tuple[str, ...] = ("linear", "packed_inputs", "int8_inputs", "groups", "int8_groups")
WATCHED += ("rows", "attention", "attention_segments", "attention_refusals")
WATCHED += ("pool", "levels", "program")
EXAMPLES = 3


def runtime(name: str) -> str:
    """A library that has to be there before Python's own."""
    command = ["gcc", f"-print-file-name={name}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip("there is no gcc")
    if not Path(found).is_absolute():
        pytest.skip(f"gcc has no {name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.rare)])
def test_operators_stay_within_their_memory(
    every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level is compiled from the same sources: this processor's best one, or all that it has
    and with more checks. Beside the best one the plain one, which every library has, is not
    watched."""
    best = library.level()
    # Without optimization, levels share inline functions, in the instructions of any of them.
    levels = compiler.levels_here() if every else [best]
    flags = {name: compiler.LEVEL_FLAGS[name] for name in levels}
    flags.setdefault("plain", ["-fno-sanitize=all"])
    monkeypatch.setattr(compiler, "LEVEL_FLAGS", flags)
    preload = [runtime("libasan.so"), runtime("libstdc++.so.6")]
    monkeypatch.setenv("CXX", "g++")
    try:
        build(tmp_path / "watched.so", FLAGS if every else [*FLAGS, *WITHOUT_POINTERS])
    except BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "GLM_MULTIUSER_TEST_LIBRARY": str(tmp_path / "watched.so"),
        "GLM_MULTIUSER_TEST_SANITIZED": "1",
        "GLM_MULTIUSER_TEST_EXAMPLES": str(EXAMPLES),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--capture=no", "-p", "no:cacheprovider"]
    command += ["-p", "no:cov", f"--confcutdir={HERE}", f"--rootdir={HERE.parent.parent}"]
    command += [str(HERE / f"test_{name}.py") for name in WATCHED]
    if not every and best != "plain":
        command += ["-k", "not plain"]
    result = subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    assert " passed" in result.stdout
