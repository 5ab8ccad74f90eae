"""The tests that the patches bring to MindFormers, run as there, in an unpacked wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mindformers.wheels import VERSIONS, patches_of, run, unpacked

TESTS = "tests/st/test_model/test_glm_model"


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("version", VERSIONS)
def test_they_pass(version: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tree = unpacked(tmp_path / version, request.config.cache, version)
    run(["git", "apply", *map(str, patches_of(version))], tree)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tree / TESTS)],
        cwd=tmp_path,  # MindFormers writes log files to where it is started
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert ended.returncode == 0, ended.stdout
    assert "13 passed" in ended.stdout, ended.stdout
