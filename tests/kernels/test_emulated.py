"""The other tests of products, at levels that this processor may not have: their instructions are
emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.backends.native import compiler
from glm_multiuser.backends.native.compiler import BuildError, build

HERE = Path(__file__).parent
EMULATED: dict[str, list[str]] = {
    "plain": [],
    "avx512vnni": ["-DGLM_EMULATE_VNNI"],
    "amx": ["-DGLM_EMULATE_VNNI", "-DGLM_EMULATE_AMX"],
}
TESTS = ("linear", "int8_inputs", "int8_groups", "levels")
EXAMPLES = 10


@pytest.mark.slow
def test_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LEVEL_FLAGS", EMULATED)
    library = tmp_path / "emulated.so"
    try:
        build(library, ["-DGLM_EMULATED"])
    except BuildError as error:
        if "no C++ compiler" in str(error):
            pytest.skip(str(error))
        raise
    environment = {
        **os.environ,
        "GLM_MULTIUSER_TEST_LIBRARY": str(library),
        "GLM_MULTIUSER_TEST_EXAMPLES": str(EXAMPLES),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
    command += [f"--confcutdir={HERE}", f"--rootdir={HERE.parent.parent}"]
    command += ["-k", "amx or avx512vnni or test_levels"]
    command += [str(HERE / f"test_{name}.py") for name in TESTS]
    result = subprocess.run(
        command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
    assert " passed" in result.stdout
