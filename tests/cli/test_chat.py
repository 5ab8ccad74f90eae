"""`glm-multiuser chat` with lines from a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable
from unittest.mock import Mock

import pytest

from glm_multiuser.cli.chat import Conversations
from glm_multiuser.cli.questions import KNOWN
from tests.cli.fake import FakeLLM


def test_every_user_has_a_history_of_their_own(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    script = "one\n/user bob\ntwo\n/user alice\nthree\n/users\n"
    result = run("chat", "--checkpoint", checkpoint, stdin=script)
    assert result.exit_code == 0, result.output
    (llm,) = fake_llm.opened
    assert llm.asked == [
        ("one", "alice", []),
        ("two", "bob", []),
        ("three", "alice", [("one", "eno")]),
    ]
    assert "* alice: 2 turns" in result.stdout
    assert "bob: 1 turn\n" in result.stdout
    assert llm.closed


def test_reset_forgets_this_user_only(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    script = "one\n/user bob\ntwo\n/reset\nthree\n/user alice\nfour\n/quit\nnever\n"
    result = run("chat", "--checkpoint", checkpoint, stdin=script)
    assert result.exit_code == 0
    assert fake_llm.opened[0].asked[2:] == [
        ("three", "bob", []),
        ("four", "alice", [("one", "eno")]),
    ]


def test_answers_stream_to_stdout(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("chat", "--checkpoint", checkpoint, stdin=f"{KNOWN[0].question}\n")
    assert result.stdout == f"{KNOWN[0].answer}\n"


def test_ctrl_c_cancels_the_answer_only(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("chat", "--checkpoint", checkpoint, stdin="interrupt me\nnext\n")
    assert result.exit_code == 0
    assert "cancelled" in result.stdout
    assert fake_llm.opened[0].asked[-1] == ("next", "alice", [])


def test_an_error_is_shown_and_the_chat_goes_on(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("chat", "--checkpoint", checkpoint, stdin="fail\nnext\n")
    assert result.exit_code == 1
    assert "error: logits of this request are not finite" in result.stderr
    assert fake_llm.opened[0].asked[-1] == ("next", "alice", [])
    assert "txen" in result.stdout


def test_help_and_unknown_commands(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path
) -> None:
    result = run("chat", "--checkpoint", checkpoint, stdin="/help\n/frobnicate\n/user\n\n")
    assert result.stdout.count("/user NAME") == 3
    assert "unknown command '/frobnicate'" in result.stdout
    assert fake_llm.opened[0].asked == []


def test_ctrl_d_ends_the_chat_although_a_ctrl_c_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Mock(**{"isatty.return_value": True}))
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    # Python raises it where the next function is called.
    console = Mock(**{"print.side_effect": [KeyboardInterrupt, None]})
    assert list(Conversations(Mock(), Mock(), console).lines()) == []
