"""`benchmarks/mindformers_comparison.py`: a small run of all variants, and when it does without."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.version import installed_version
from tests.mindformers.children import CHECKOUT

BENCHMARKS = CHECKOUT / "benchmarks"
TINY = "--hidden 64 --layers 2 --inner 256 --heads 4 --vocab 256 --seq-length 64 --new-tokens 8"
FIGURES = {"near_ties", "tok_s", "decode_tok_s", "ttft_ms", "start_s", "peak_rss_mb", "mb_per_user"}
OTHERS = {"variant", "users", "reason", "skipped", "times_best_mindformers"}


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module; it finds its other files as when it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("mindformers_comparison")


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.skipif(installed_version("mindformers") == "not installed", reason="needs MindFormers")
def test_all_variants_give_the_same_tokens(tmp_path: Path) -> None:
    words = [str(BENCHMARKS / "mindformers_comparison.py"), "--users", "2", *TINY.split()]
    ended = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert set(last) == {
        "conditions",
        "runs",
        "tokens_equal",
        "tokens_differ",
        "near_ties",
        "different_answers",
    }
    assert last["tokens_equal"] is True
    assert last["tokens_differ"] == []
    assert last["near_ties"] <= 1
    assert last["different_answers"] == 2  # or else equal tokens would prove nothing
    assert last["conditions"]["mindformers"]
    assert [one["variant"] for one in last["runs"]] == ["int", "tensor", "engine"]
    for one in last["runs"]:
        assert set(one) == FIGURES | OTHERS
        assert (one["users"], one["reason"], one["skipped"]) == (2, None, False)
        assert one["tok_s"] > 0
        assert 0 < one["ttft_ms"]["p50"] <= one["ttft_ms"]["worst"]
        assert one["start_s"] > 0
        assert one["peak_rss_mb"] > 100
    rates = {one["variant"]: one["times_best_mindformers"] for one in last["runs"]}
    assert max(rates["int"], rates["tensor"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mindformers_comparison.png"]


def test_a_run_that_would_fill_the_memory_is_left_out(
    comparison: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run_worker(worker: list[str], job: Any) -> dict[str, Any]:
        users = job["settings"]["users"]
        started.append((job["variant"], users))
        return {
            "tok_s": 10.0,
            "decode_tok_s": 11.0,
            "ttft_ms": {"p50": 1.0, "worst": 2.0},
            "start_s": 3.0,
            "peak_rss_mb": 2000.0 + 1000 * users,
            "mb_per_user": 1000.0,
            "answers": {f"bench {user}": [user] for user in range(users)},
        }

    monkeypatch.setattr(comparison, "run_worker", run_worker)
    monkeypatch.setattr(comparison, "available_mb", lambda: 12_000.0)
    settings = comparison.RunSettings(1, 64, 16, 8)
    runs, answers, differing = comparison.run_all(settings, [1, 8, 16], ["int", "engine"])
    assert started == [("int", 1), ("engine", 1), ("int", 8), ("engine", 8), ("engine", 16)]
    left_out = runs[4]
    assert (left_out["tok_s"], left_out["ttft_ms"], left_out["skipped"]) == (None, None, True)
    assert "would need about 18,000 MB" in left_out["reason"]
    assert (len(answers), differing) == (16, [])
    assert comparison.table_of(runs).row_count == 6


def test_other_tokens_and_a_failed_run_are_told(
    comparison: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(worker: list[str], job: Any) -> dict[str, Any]:
        if job["variant"] == "tensor":
            raise comparison.GLMMultiUserError("its process ended with code -9")
        return {"tok_s": 1.0, "answers": {"bench 0": [1 if job["variant"] == "int" else 2]}}

    monkeypatch.setattr(comparison, "run_worker", run_worker)
    settings = comparison.RunSettings(1, 64, 16, 8)
    runs, _, differing = comparison.run_all(settings, [1], ["int", "tensor", "engine"])
    assert differing == ["1 user, MultiUserLLM"]
    assert runs[1]["reason"] == "its process ended with code -9"
    assert runs[1]["skipped"] is False


@pytest.mark.parametrize(("gap", "differing"), [(0.5, 1), (1e-4, 0)])
def test_answers_may_part_only_at_a_near_tie(
    comparison: Any, monkeypatch: pytest.MonkeyPatch, gap: float, differing: int
) -> None:
    def run_worker(worker: list[str], job: Any) -> dict[str, Any]:
        if job["variant"] == "tensor":
            return {"tok_s": 1.0, "answers": {"bench 0": [1, 2, 3]}}
        answers, gaps = {"bench 0": [1, 4, 5]}, {"bench 0": [0.9, gap, 0.9]}
        return {"tok_s": 1.0, "answers": answers, "gaps": gaps}

    monkeypatch.setattr(comparison, "run_worker", run_worker)
    settings = comparison.RunSettings(1, 64, 16, 8)
    runs, _, found = comparison.run_all(settings, [1], ["tensor", "engine"])
    assert len(found) == differing
    assert runs[1]["near_ties"] == 1 - differing
