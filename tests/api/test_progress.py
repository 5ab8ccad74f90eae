"""Progress goes to the caller's function, to a bar on a terminal, or nowhere."""

from __future__ import annotations

import io
import sys

import pytest

from glm_multiuser.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_callers_function_is_used_as_it_is() -> None:
    seen: list[tuple[int, int, str]] = []

    def report(*what: object) -> None:
        seen.append(what)  # type: ignore[arg-type]

    with show_progress(report) as shown:
        shown(1, 2, "half")
    assert seen == [(1, 2, "half")]


def test_nothing_is_printed_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress(None) as shown:
        shown(1, 2, "half")
    assert stream.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(None) as shown:
        shown(0, 4, "reading")
        shown(3, 4, "compiling")
    assert "compiling" in terminal.getvalue()
    assert "3/4" in terminal.getvalue()


def test_others_print_where_they_did_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    stdout = sys.stdout
    with show_progress(None) as shown:
        shown(0, 4, "reading")
        assert (sys.stdout, sys.stderr) == (stdout, terminal)
        print("an answer")
    assert capsys.readouterr().out == "an answer\n"
    assert "an answer" not in terminal.getvalue()
