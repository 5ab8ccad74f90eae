"""Runs the other kernel tests at levels that this processor may lack, with emulated instructions.
Requires AVX2."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import AVX2, BuildError, build
from glm_multiuser.backends.native.library import LEVEL
from tests.kernels.calling import PATH, levels_here

HERE = Path(__file__).parent
VNNI, BF16 = "-DEMULATE_AVX512VNNI", "-DEMULATE_AVX512BF16"
# GCC would warn that vectors of 64 bytes are passed in another way than with AVX-512.
AVX512 = [*AVX2, "-include", str(HERE / "avx512.hpp"), "-Wno-psabi"]
EMULATED: dict[str, list[str]] = {
    "plain": ["-O0"],  # which every library has; it is not what is tested
    "avxvnni": [*AVX2, "-include", str(HERE / "avxvnni.hpp")],
    "avx512": AVX512,
    "avx512vnni": [*AVX512, VNNI],
    "avx512bf16": [*AVX512, VNNI, BF16],
    "amx": [*AVX512, VNNI, BF16, "-DGLM_EMULATE_AMX"],
}
OFTEN = ("amx",)
"""It has nearly all instructions of the others."""
OTHERS = tuple(name for name in EMULATED if name not in ("plain", *OFTEN))
PRODUCTS = ("linear", "groups", "packed_inputs", "int8_inputs", "int8_groups")
TESTS = (*PRODUCTS, "attention", "attention_segments", "rows", "levels")
EXAMPLES = 4
SECONDS = 3600
"""Emulated models take ten minutes, and half an hour on a machine that others use."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov")


def emulate(target: Path, levels: Sequence[str]) -> None:
    """Builds a library that has these levels on any processor with AVX2."""
    if not PATH.exists() or "avx2" not in levels_here():
        pytest.skip("there is no compiler, or no AVX2")
    wanted = {name: EMULATED[name] for name in ("plain", *levels)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "LEVEL_FLAGS", wanted)
        try:
            # "-O1" takes four times as long to compile.
            build(target, ["-DGLM_EMULATED", "-Og"])
        except BuildError as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("emulated") / "emulated.so"
    emulate(made, OFTEN)
    return made


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("others") / "others.so"
    emulate(made, OTHERS)
    return made


def python_with(path: Path, *arguments: str, level: str = "") -> str:
    """What Python prints that calls the operators of this library."""
    environment = {
        **os.environ,
        "GLM_MULTIUSER_TEST_LIBRARY": str(path),
        "GLM_MULTIUSER_TEST_EXAMPLES": str(EXAMPLES),
        LEVEL: level,
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


def run_tests(library: Path, levels: Sequence[str]) -> None:
    here = "from tests.kernels.calling import levels_here; print(*levels_here())"
    assert {*python_with(library, "-c", here).split()} == {"plain", *levels}
    command = [f"--confcutdir={HERE}", f"--rootdir={HERE.parent.parent}", "-k", "not plain"]
    command += [str(HERE / f"test_{name}.py") for name in TESTS]
    assert " passed" in python_with(library, *PYTEST, *command)


@pytest.mark.slow
def test_levels(emulated: Path) -> None:
    run_tests(emulated, OFTEN)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(SECONDS)
def test_other_levels(others: Path) -> None:
    run_tests(others, OTHERS)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("made", "name"), [("emulated", "amx"), ("others", "avx512bf16")])
def test_whole_models(made: str, name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(made)
    command = ["-p", "tests.kernels.library_for_tests", "-m", "not rare", "-k", "not portable"]
    command += ["tests/models/test_golden_native.py", "tests/e2e/test_flagship.py"]
    assert " passed" in python_with(path, *PYTEST, *command, level=name)


@pytest.mark.slow
def test_tiles_have_the_bits_of_the_processor(emulated: Path, best_level: ctypes.CDLL) -> None:
    if not best_level.glm_force_level(b"amx"):
        pytest.skip("this processor, or this build, has no amx")
    command = ("-m", "tests.kernels.tile_products")
    lines = python_with(PATH, *command).splitlines()
    assert len(set(lines)) > 20
    assert python_with(emulated, *command).splitlines() == lines
