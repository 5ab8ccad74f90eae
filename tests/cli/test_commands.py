"""The command as a whole: help, version, and how errors look."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser import package_data
from glm_multiuser.cli import loading
from tests.cli.fake import FakeLLM

COMMANDS = ("demo", "chat", "generate", "serve", "bench", "plan", "selfcheck", "convert", "patch")


def test_help_names_every_command(run: Callable[..., Any]) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Callable[..., Any], command: str) -> None:
    assert run(command, "--help").exit_code == 0


def test_version(run: Callable[..., Any]) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("glm-multiuser ")
    assert "mindspore" in result.stdout


def test_help_does_not_load_mindspore() -> None:
    program = (
        "import sys; from glm_multiuser.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'mindspore', 'matplotlib', 'numpy'} & {*sys.modules}"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert "selfcheck" in child.stdout


@pytest.mark.parametrize("command", ["demo", "chat", "generate", "selfcheck"])
def test_a_missing_checkpoint_is_one_line_and_exit_code_2(
    run: Callable[..., Any], command: str
) -> None:
    result = run(command, "--checkpoint", "no/such/folder", stdin="who?\n")
    assert result.exit_code == 2
    assert "error: no checkpoint at no/such/folder" in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_default_checkpoint_is_also_found_from_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = checkout / "ckpt" / "glm-tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(package_data, "ROOT", checkout)
    monkeypatch.chdir(elsewhere)
    assert loading.find_checkpoint(loading.DEFAULT_CHECKPOINT) == folder


def test_the_engine_is_closed_even_after_an_error(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("generate", "--checkpoint", checkpoint, "--out", "/dev/full", stdin="a\n")
    assert isinstance(result.exception, OSError)
    assert [llm.closed for llm in fake_llm.opened] == [True]


def test_ctrl_c_reaches_python_whatever_handler_the_library_below_sets() -> None:
    program = """
import ctypes, os, queue, signal, threading
from glm_multiuser.cli.interrupts import keep_ctrl_c
keep_ctrl_c()
signal.signal(signal.SIGINT, lambda *one: signal.default_int_handler(*one))
ctypes.CDLL(None).signal(signal.SIGINT, None)  # what MindSpore does, only worse: the C default
for _ in range(2):
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        queue.SimpleQueue().get()
    except KeyboardInterrupt:
        print("interrupted")
"""
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "interrupted\n" * 2), child.stderr
