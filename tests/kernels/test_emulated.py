"""The other tests of products and of attention, at levels that this processor may not have: their
instructions are emulated."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import BuildError, build
from tests.kernels.calling import PATH

HERE = Path(__file__).parent
EMULATED: dict[str, list[str]] = {
    "plain": ["-O0"],  # which every library has; it is not what is tested
    "avx512vnni": ["-DGLM_EMULATE_VNNI"],
    "amx": ["-DGLM_EMULATE_VNNI", "-DGLM_EMULATE_AMX"],
}
TESTS = ("linear", "groups", "laid_rows", "int8_inputs", "int8_groups", "levels")
EXAMPLES = 4


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose levels need no instructions of a processor."""
    made = tmp_path_factory.mktemp("emulated") / "emulated.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "LEVEL_FLAGS", EMULATED)
        try:
            # "-O1" takes three times as long to compile, and the tests three quarters as long.
            build(made, ["-DGLM_EMULATED", "-Og"])
        except BuildError as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise
    return made


def python_with(path: Path, *arguments: str) -> str:
    """What Python prints that calls the operators of this library."""
    environment = {
        **os.environ,
        "GLM_MULTIUSER_TEST_LIBRARY": str(path),
        "GLM_MULTIUSER_TEST_EXAMPLES": str(EXAMPLES),
    }
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=HERE.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    return result.stdout


@pytest.mark.slow
def test_products(emulated: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
    command += [f"--confcutdir={HERE}", f"--rootdir={HERE.parent.parent}"]
    # Emulated, `avx512vnni` differs from `plain` in products of int8 alone.
    command += ["-k", "amx or avx512vnni and int8 or test_levels"]
    command += [str(HERE / f"test_{name}.py") for name in TESTS]
    assert " passed" in python_with(emulated, *command)


@pytest.mark.slow
def test_attention(emulated: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
    command += [f"--confcutdir={HERE}", f"--rootdir={HERE.parent.parent}", "-k", "amx"]
    assert " passed" in python_with(emulated, *command, str(HERE / "test_attention.py"))


@pytest.mark.slow
def test_tiles_have_the_bits_of_the_processor(emulated: Path, best_level: ctypes.CDLL) -> None:
    if not best_level.glm_force_level(b"amx"):
        pytest.skip("this processor, or this build, has no amx")
    command = ("-m", "tests.kernels.tile_products")
    lines = python_with(PATH, *command).splitlines()
    assert len(set(lines)) > 20
    assert python_with(emulated, *command).splitlines() == lines
