"""Wrong options of the examples are errors of argparse; what fails later is an exit code."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from tests.server.process import ROOT


@pytest.mark.parametrize(
    ("example", "option", "value", "words"),
    [
        ("multi_thread_benchmark.py", "--threads", "0", "0; it must be at least 1"),
        ("multi_thread_benchmark.py", "--rounds", "0", "0; it must be at least 1"),
        ("multi_thread_benchmark.py", "--seq-length", "-1", "-1; it must be at least 1"),
        ("clients/triton_client.py", "--url", "http://127.0.0.1:1", "it must be HOST:PORT"),
    ],
)
def test_a_wrong_option(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: str,
    option: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [example, option, value])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert f"error: argument {option}: " in error
    assert error.endswith(f"{words}\n")


@pytest.mark.parametrize(("model", "answers"), [("glm-tiny", 1), ("chatglm3-tiny", 0)])
def test_a_prompt_too_long_for_a_thread_is_an_exit_code(model: str, answers: int) -> None:
    example = ROOT / "examples" / "multi_thread_benchmark.py"
    options = f"--checkpoint {ROOT / 'ckpt' / model} --threads 2 --rounds 1 --seq-length 8"
    ended = subprocess.run(
        [sys.executable, str(example), *options.split()], capture_output=True, encoding="utf-8"
    )
    assert ended.returncode == 1
    assert ended.stdout.count(" -> ") == answers
    assert "graphs compiled" in ended.stdout
    assert "PromptTooLongError: prompt has " in ended.stderr
