"""Standard streams that are closed, names with brackets, and files that must not be written to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli import demo, patch
from glm_multiuser.errors import EngineClosedError
from glm_multiuser.progress import show_progress
from tests.cli.fake import WITH_FAKE_MODEL, FakeLLM
from tests.server.process import ROOT


def with_closed(stream: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, with a standard stream that the shell has closed."""
    program = [sys.executable, "-c", WITH_FAKE_MODEL, *words]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}&-', "sh", *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="abc\n",
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def test_a_closed_stdin_is_an_empty_one() -> None:
    generated, chatted = with_closed("0<", "generate"), with_closed("0<", "chat")
    assert (generated.returncode, generated.stderr) == (2, "error: stdin has no prompts\n")
    assert (chatted.returncode, chatted.stdout) == (0, "")


@pytest.mark.parametrize("stream", ["1>", "2>"])
def test_a_closed_output_takes_everything(stream: str) -> None:
    ended = with_closed(stream, "generate")
    assert ended.returncode == 0
    assert ('"text": "cba"' in ended.stdout) == (stream == "2>")


@pytest.mark.parametrize("rows_on_terminal", [False, True])
def test_rows_go_to_stdout_while_stderr_is_a_terminal(
    tmp_path: Path, rows_on_terminal: bool
) -> None:
    """As in `glm-multiuser generate prompts.txt > answers.jsonl`, which draws a bar meanwhile."""
    (tmp_path / "prompts.txt").write_text("天气\nabc\n", encoding="utf-8")
    answers = tmp_path / "answers.jsonl"
    controller, terminal = os.openpty()
    with answers.open("wb") as file:
        command = subprocess.Popen(
            [sys.executable, "-c", WITH_FAKE_MODEL, "generate", tmp_path / "prompts.txt"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "40"},
            stdout=terminal if rows_on_terminal else file,
            stderr=terminal,
        )
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the end of what a terminal shows
        while part := os.read(controller, 4096):
            shown += part
    os.close(controller)
    assert command.wait() == 0, shown.decode()
    lines = (shown if rows_on_terminal else answers.read_bytes()).decode().splitlines()
    assert [json.loads(line)["text"] for line in lines if line.startswith("{")] == ["气天", "cba"]
    assert ("prompts" in shown.decode().replace("prompts.txt", "")) != rows_on_terminal


def test_there_is_no_bar_on_a_closed_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with show_progress(None) as report:
        report(1, 2, "weights")


@pytest.mark.parametrize("name", ["a [red] b", "[/b]"])
def test_brackets_are_printed_as_they_are(
    run: Callable[..., Any], checkpoint: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    shutil.copytree(checkpoint, folder)
    result = run("plan", "--model", folder, "--seq-length", 64, "--device-memory", "1MiB")
    assert result.exit_code == 0, result.output
    assert f"{folder} does not fit on 910A" in result.stdout
    refused = run("chat", "--checkpoint", f"{folder}/no")
    assert f"no checkpoint at {folder}/no" in refused.stderr


def test_users_are_checked_before_their_questions_are_made(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "questions", lambda count: pytest.fail("counts to it"))
    result = run("demo", "--users", 10**9)
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: users is {10**9}; it must be between 1 and 1024\n",
    )


def test_the_file_of_prompts_is_not_written_to(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    prompts, link = tmp_path / "prompts.txt", tmp_path / "link"
    prompts.write_text("abc\n")
    link.symlink_to(prompts)
    for out in (prompts, link):
        result = run("generate", prompts, "--out", out, "--checkpoint", checkpoint)
        assert result.exit_code == 2
        assert f"out is {out}, which is the file of prompts" in result.stderr
    assert prompts.read_text() == "abc\n"
    assert fake_llm.opened == []


def test_the_file_of_prompts_on_stdin_is_not_written_to(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    with prompts.open() as stdin:
        result = subprocess.run(
            [sys.executable, "-c", WITH_FAKE_MODEL, "generate", "-", "--out", prompts],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=stdin,
            capture_output=True,
            encoding="utf-8",
        )
    assert result.returncode == 2
    assert f"out is {prompts}, which is the file of prompts" in result.stderr.replace("\n", " ")
    assert prompts.read_text() == "abc\n"


def test_resume_reads_no_pipe(run: Callable[..., Any], fake_llm: type[FakeLLM]) -> None:
    reader, writer = os.pipe()
    try:
        result = run("generate", "--out", f"/dev/fd/{writer}", "--resume", stdin="abc\n")
    finally:
        os.close(reader)
        os.close(writer)
    assert result.exit_code == 2
    assert "--resume needs a file that it can read" in result.stderr


def test_what_fails_later_has_exit_code_1(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> None:
        raise EngineClosedError("tritonserver ended by itself")

    monkeypatch.setattr(patch, "read_all_series", ended)
    result = run("patch", "--list")
    assert (result.exit_code, result.stderr) == (1, "error: tritonserver ended by itself\n")
