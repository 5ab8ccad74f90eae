"""Wrong options of the examples are errors of argparse."""

from __future__ import annotations

import runpy
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
