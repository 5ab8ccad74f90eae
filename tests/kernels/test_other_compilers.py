"""Runs the other kernel tests with a library built with other compiler options."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler, library
from glm_multiuser.backends.native.compiler import LEVEL_FLAGS, build
from tests.kernels.test_emulated import run_tests

CHAINS_UNFUSED = "--param=avoid-fma-max-bits=512"
"""GCC then fuses no product with a sum that a loop goes on with, if there is a single one: in the
loop over one row it may do so, and in the one over several not. GCC 14 does so by default."""


@pytest.mark.slow
@pytest.mark.rare
def test_bits_do_not_depend_on_what_a_compiler_fuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = library.level()
    if best == "plain" or shutil.which("g++") is None:
        pytest.skip("there is no g++, or nothing that it could fuse")
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(
        compiler, "LEVEL_FLAGS", {"plain": ["-O0"], best: [*LEVEL_FLAGS[best], CHAINS_UNFUSED]}
    )
    build(tmp_path / "other.so")
    run_tests(tmp_path / "other.so", [best])
