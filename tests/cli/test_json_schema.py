"""`--json-schema` of `generate` and `chat`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable

import jsonschema
import pytest

from glm_multiuser.cli import loading
from tests.structured.random_model import random_llm

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


class RandomLLM:
    """In the place of the class that commands open a model with."""

    @staticmethod
    def from_pretrained(folder: str, **settings: Any) -> Any:
        from glm_multiuser.tokenizers import load_tokenizer

        return random_llm(load_tokenizer(folder), users=2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "llm_class", lambda: RandomLLM)
    found = tmp_path / "schema.json"
    found.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return found


def test_every_answer_of_generate_fits(run: Callable[..., Any], file: Path) -> None:
    result = run("generate", "-", "--json-schema", file, stdin="a\nb\nc\n")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 3
    for row in rows:
        jsonschema.validate(json.loads(row["text"]), SCHEMA)


def test_every_answer_of_chat_fits(run: Callable[..., Any], file: Path) -> None:
    result = run("chat", "--json-schema", file, stdin="a\nb\n")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines() if line]
    assert len(answers) == 2
    for answer in answers:
        jsonschema.validate(answer, SCHEMA)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_file_that_is_no_schema_is_rejected_before_a_model_is_opened(
    run: Callable[..., Any], file: Path, command: str
) -> None:
    file.write_text("[1", encoding="utf-8")
    result = run(command, "--json-schema", file, stdin="a\n")
    assert result.exit_code != 0
    assert "is not JSON" in result.stderr
    result = run(command, "--json-schema", file.with_name("none.json"), stdin="a\n")
    assert result.exit_code != 0
    assert "cannot read" in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_missing_llguidance_is_found_before_a_model_is_opened(
    run: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = run(command, "--json-schema", file, stdin="a\n")
    assert result.exit_code == 2
    (message,) = result.stderr.splitlines()  # and no line about a model
    assert message.startswith("error: grammar needs the package llguidance, which is not installed")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_unsupported_schema_is_rejected_before_the_first_prompt(
    run: Callable[..., Any], file: Path, command: str
) -> None:
    file.write_text(json.dumps({"type": "array", "uniqueItems": True}), encoding="utf-8")
    result = run(command, "--json-schema", file, stdin="a\nb\n")
    assert result.exit_code == 2
    assert result.stdout == ""
    (message,) = result.stderr.splitlines()[1:]
    assert message.startswith("error: json_schema: ")
    assert "uniqueItems" in message
