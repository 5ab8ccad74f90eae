"""`glm-multiuser selfcheck`: each check can pass, fail and be skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from glm_multiuser.cli import selfcheck
from glm_multiuser.cli.questions import KNOWN
from glm_multiuser.engine import graph_shapes
from glm_multiuser.errors import GenerationError, InvalidParameterError
from tests.cli.fake import FakeLLM, Params, Result, Stats


def statuses(output: str) -> dict[str, str]:
    """The table's first two columns."""
    rows = [line.split("│") for line in output.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in rows if row[1].strip()}


@dataclass(frozen=True)
class Logprobs:
    top: Mapping[int, float]


@pytest.fixture
def golden(tmp_path: Path, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A golden folder that the fake model answers exactly: its ids count upwards."""
    folder = tmp_path / "golden"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    cases = [
        {"index": 0, "name": "short", "input_ids": [5, 6], "n_new": 3, "greedy": [7, 8, 9]},
        {"index": 1, "name": "long", "input_ids": [20], "n_new": 2, "greedy": [21, 22]},
    ]
    (folder / "expected.json").write_text(json.dumps({"cases": cases}))
    logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32)) + 3
    np.savez(folder / "expected.npz", **{f"{index}/fp32/last_logits": logits for index in (0, 1)})
    generate = fake_llm.generate

    def with_logprobs(self: FakeLLM, prompts: Any, params: list[Params]) -> list[Result]:
        top = {2: float(np.log(0.7)), 1: float(np.log(0.2))}
        results = generate(self, prompts, params)
        return [replace(result, logprobs=[Logprobs(top)]) for result in results]

    monkeypatch.setattr(fake_llm, "generate", with_logprobs)
    return folder


def check(run: Callable[..., Any], checkpoint: Path, golden: Path) -> Any:
    return run("selfcheck", "--checkpoint", checkpoint, "--golden", golden)


def test_all_is_well(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, golden: Path
) -> None:
    result = check(run, checkpoint, golden)
    assert result.exit_code == 0, result.output
    assert statuses(result.stdout) == {
        "golden logits": "ok",
        "start": "ok",
        "kernels": "ok",
        "known answers": "ok",
        "isolation": "ok",
        "compiles after ready": "ok",
        "batch invariance": "ok",
    }
    assert "native, avx2" in result.stdout
    assert [llm.closed for llm in fake_llm.opened] == [True, True]
    assert fake_llm.opened[0].settings["dtype"] == "float32"


def test_other_golden_tokens_fail(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, golden: Path
) -> None:
    path = golden / "expected.json"
    path.write_text(path.read_text().replace("[21, 22]", "[21, 23]"))
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    assert statuses(result.stdout)["golden logits"] == "FAILED"
    assert "(wrong: long)" in " ".join(result.stdout.split())


def test_other_golden_logits_fail(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, golden: Path
) -> None:
    logits = np.log(np.array([0.1, 0.21, 0.69], dtype=np.float32))
    np.savez(golden / "expected.npz", **{f"{index}/fp32/last_logits": logits for index in (0, 1)})
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    assert "0 of 2 cases" in result.stdout


def test_what_cannot_be_checked_is_skipped_with_its_reason(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = checkpoint.rename(tmp_path / "another-model")
    monkeypatch.setattr(fake_llm, "final_stats", Stats(batch_invariant=None))
    result = check(run, other, golden)
    assert result.exit_code == 0
    got = statuses(result.stdout)
    assert [name for name, status in got.items() if status == "skipped"] == [
        "known answers",
        "batch invariance",
    ]


def test_isolation_is_skipped_where_questions_cannot_be_asked(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    golden: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: FakeLLM, prompt: str) -> list[int]:
        raise InvalidParameterError("this checkpoint has no tokenizer; give token ids")

    monkeypatch.setattr(fake_llm, "prompt_token_ids", refuse)
    result = check(run, checkpoint, golden)
    assert statuses(result.stdout)["isolation"] == "skipped"
    assert "this checkpoint has no tokenizer" in " ".join(result.stdout.split())


def test_known_answers_and_isolation_show_an_error(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    golden: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: FakeLLM, prompt: str, **arguments: Any) -> Iterator[Any]:
        raise GenerationError("logits are not finite")

    monkeypatch.setattr(fake_llm, "stream_chat", fail)
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    assert statuses(result.stdout)["known answers"] == "FAILED"
    assert statuses(result.stdout)["isolation"] == "FAILED"
    shown = " ".join(result.stderr.split() + result.stdout.replace("│", " ").split())
    assert shown.count("; GenerationError: logits are not finite") == 2
    assert "user alone; GenerationError: logits are not finite" in shown


def test_a_golden_folder_that_is_none(run: Callable[..., Any], checkpoint: Path) -> None:
    result = check(run, checkpoint, checkpoint / "nowhere")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: golden is {checkpoint / 'nowhere'}; it must be")


def test_a_wrong_answer_and_a_mixed_answer_fail(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    golden: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_llm, "wrong_for", ("user 3",))
    monkeypatch.setattr(
        selfcheck, "KNOWN", (KNOWN[0]._replace(answer="something else"), *KNOWN[1:])
    )
    stats = Stats(compiles_after_ready=2, batch_invariant=False)
    monkeypatch.setattr(fake_llm, "final_stats", stats)
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    got = statuses(result.stdout)
    assert got.pop("golden logits") == "ok"
    assert (got.pop("start"), got.pop("kernels")) == ("ok", "ok")
    assert set(got.values()) == {"FAILED"}
    assert KNOWN[0].question in result.stdout


def test_a_check_that_breaks_has_failed_and_the_others_run(
    run: Callable[..., Any], fake_llm: type[FakeLLM], checkpoint: Path, golden: Path
) -> None:
    (golden / "expected.npz").unlink()
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    got = statuses(result.stdout)
    assert got["golden logits"] == "FAILED"
    assert got["isolation"] == "ok"


def test_an_engine_that_does_not_start_is_a_failed_check(
    run: Callable[..., Any],
    fake_llm: type[FakeLLM],
    checkpoint: Path,
    golden: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("the device says no\nC++ stack: many lines")

    monkeypatch.setattr(fake_llm, "from_pretrained", refuse)
    result = check(run, checkpoint, golden)
    assert result.exit_code == 1
    assert statuses(result.stdout) == {"golden logits": "FAILED", "start": "FAILED"}
    assert "RuntimeError: the device says no" in " ".join(result.stdout.split())
    assert "C++" not in result.output


@pytest.mark.slow
def test_the_real_model(
    run: Callable[..., Any], glm_tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_shapes, "SMALLEST_PROMPT", 256)  # a single graph for prompts
    # No request waits: the checks ask no more at once than there are slots.
    result = run("selfcheck", "--checkpoint", glm_tiny, "--max-queue", 0)
    assert result.exit_code == 0, result.output
    got = statuses(result.stdout)
    assert got["known answers"] == got["isolation"] == got["compiles after ready"] == "ok"
