"""`examples/mindformers_multi_thread.py` as people run it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.cli.questions import KNOWN
from glm_multiuser.version import installed_version
from tests.mindformers.children import CHECKOUT

pytestmark = pytest.mark.skipif(
    installed_version("mindformers") == "not installed", reason="needs MindFormers"
)

GLM_TINY = CHECKOUT / "ckpt" / "glm-tiny"
EXAMPLE = CHECKOUT / "examples" / "mindformers_multi_thread.py"
PIECE = re.compile(r"user +(\d+) +\d+\.\d\d s  ('.*'|\".*\")")


@pytest.fixture(params=["Hugging Face", "MindFormers"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """glm-tiny in both of its layouts."""
    if request.param == "Hugging Face":
        return GLM_TINY
    words = ["-m", "glm_multiuser.cli", "convert", str(GLM_TINY), str(tmp_path / "ckpt")]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return tmp_path / "ckpt"


@pytest.mark.slow
@pytest.mark.rare
def test_every_user_reads_the_known_answer(checkpoint: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLE, "--users", "4", "--checkpoint", checkpoint],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
    )
    assert ended.returncode == 0, ended.stderr
    streams, _, summary = ended.stdout.partition("\n\n")
    answers = [""] * 4
    for line in streams.splitlines():
        piece = PIECE.fullmatch(line)
        assert piece, line  # threads that print into each other's lines, or another library's log
        answers[int(piece[1])] += ast.literal_eval(piece[2])
    assert answers == [known.answer for known in KNOWN[:4]]
    assert "4 of 4 answers are, word for word," in summary
    assert not (tmp_path / "output").exists()  # MindFormers' log files
