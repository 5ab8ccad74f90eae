"""Commands with the real small model, which is compiled once for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli import loading
from glm_multiuser.cli.questions import KNOWN
from glm_multiuser.engine import graph_shapes


@pytest.fixture(scope="module")
def compiled_llm(glm_tiny: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_shapes, "SMALLEST_PROMPT", 64)  # fewer graphs
        llm = loading.llm_class().from_pretrained(glm_tiny, users=3, seq_length=256)
    with llm:
        yield llm


@pytest.fixture
def real_llm(compiled_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every command uses the model that is already there, and leaves it open."""
    monkeypatch.setattr(loading, "open_llm", lambda *_, **__: nullcontext(compiled_llm))
    return compiled_llm


def test_chat_of_two_users(run: Callable[..., Any], real_llm: Any) -> None:
    script = f"{KNOWN[0].question}\n/user bob\n{KNOWN[1].question}\n/users\n"
    result = run("chat", stdin=script)
    assert result.exit_code == 0, result.output
    assert KNOWN[0].answer in result.stdout
    assert KNOWN[1].answer in result.stdout


def test_demo_of_three_users(run: Callable[..., Any], real_llm: Any) -> None:
    result = run("demo", "--users", 3)
    assert result.exit_code == 0, result.output
    assert "3 of 3 answers are identical to the same user alone" in result.stdout
    assert KNOWN[0].answer in result.stdout
    assert "0 compiled after ready" in " ".join(result.stdout.split())


def test_generate(run: Callable[..., Any], real_llm: Any) -> None:
    lines = [KNOWN[0].question, json.dumps({"prompt": KNOWN[1].question, "user": "bob"})]
    result = run("generate", stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    got = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"].strip() for row in got] == [KNOWN[0].answer, KNOWN[1].answer]
    assert all(row["finish_reason"] == "stop" for row in got)
    assert all(row["usage"]["completion_tokens"] == len(row["token_ids"]) for row in got)
