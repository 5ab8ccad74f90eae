"""Percentiles, fairness and rates, with values known beforehand."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from glm_multiuser.cli import measure
from glm_multiuser.cli.measure import RequestTimes
from tests.cli.fake import FakeLLM, Params


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 100, 4.0),
        ([0.0, 10.0], 95, 9.5),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert measure.percentile(values, percent) == pytest.approx(expected)


def test_percentile_is_numpys() -> None:
    values = np.random.default_rng(0).normal(size=37).tolist()
    for percent in (1, 50, 90, 95, 99):
        assert measure.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_percentiles_are_in_milliseconds_and_none_of_nothing() -> None:
    assert measure.percentiles_ms([0.001, 0.003]) == {"p50": 2.0, "p95": 2.9, "p99": 2.98}
    assert measure.percentiles_ms([]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 3.0, 3.0], 1.0),
        ([5.0, 0.0, 0.0, 0.0], 0.25),
        ([1.0, 2.0, 3.0], 36 / 42),
        ([0.0, 0.0], 1.0),
    ],
)
def test_jain_index(values: list[float], expected: float) -> None:
    assert measure.jain_index(values) == pytest.approx(expected)


def two_users() -> list[RequestTimes]:
    """User 0 decodes from 1 s to 4 s, user 1 from 2 s to 5 s; both are decoding from 2 s to 4 s."""
    return [
        RequestTimes(0.0, (1.0, 2.0, 3.0, 4.0)),
        RequestTimes(0.5, (2.0, 3.0, 4.0, 5.0)),
    ]


def test_rates() -> None:
    assert measure.total_rate(two_users()) == pytest.approx(8 / 5)
    # After 2 s and up to 4 s: two tokens of each user, in two seconds.
    assert measure.decode_rate(two_users()) == pytest.approx(2.0)
    # Whichever user's token of a step is read first.
    for delay in (0.25, -0.25):
        later = RequestTimes(0.5, tuple(moment + delay for moment in (2.0, 3.0, 4.0, 5.0)))
        assert measure.decode_rate([two_users()[0], later]) == pytest.approx(2.0)
    # Two tokens that are read at once.
    at_once = [RequestTimes(0.0, (0.0, 2.0, 2.0, 3.0)), RequestTimes(0.0, (1.0, 2.0, 3.0))]
    assert measure.decode_rate(at_once) == pytest.approx(4.5 / 2)


def test_decode_rate_is_none_when_the_users_never_decode_together() -> None:
    apart = [RequestTimes(0.0, (1.0, 2.0)), RequestTimes(0.0, (3.0, 4.0))]
    assert measure.decode_rate(apart) is None


def test_summary() -> None:
    summary = measure.summary([two_users()])
    assert summary["ttft_ms"] == {"p50": 1250.0, "p95": 1475.0, "p99": 1495.0}
    assert summary["itl_ms"] == {"p50": 1000.0, "p95": 1000.0, "p99": 1000.0}
    assert summary["fairness"] == pytest.approx(measure.jain_index([1.0, 4 / 4.5]), abs=1e-4)
    assert (summary["tok_s"], summary["decode_tok_s"]) == (1.6, 2.0)


def test_engine_summary_counts_only_what_lies_between() -> None:
    start = {"start_seconds": 3.0, "compile_seconds": 2.0}
    start.update(compiles=12, compiles_after_ready=0)
    before = SimpleNamespace(
        tokens_generated=8 + 20,
        mean_batch=2.0,
        graph_seconds=5.0,
        overhead_seconds=5.0,
        **start,
    )
    after = SimpleNamespace(
        tokens_generated=3 * 8 + 140,
        mean_batch=3.5,
        graph_seconds=8.0,
        overhead_seconds=6.0,
        **start,
    )
    # 20 rows in 10 steps before, 140 rows in 40 steps after: 120 rows in 30 steps between.
    assert measure.engine_summary(before, after, users=8, rounds=2) == {  # type: ignore[arg-type]
        "occupancy": 0.5,
        "overhead_share": 0.25,
        "start_s": 3.0,
        "compile_s": 2.0,
        "graphs": 12,
        "compiles_after_ready": 0,
    }


def test_random_prompts_repeat_and_end_with_the_special_ids() -> None:
    prompts = measure.random_prompts(4, 16, vocab_size=100, ending=(96, 98))
    assert prompts == measure.random_prompts(4, 16, vocab_size=100, ending=(96, 98))
    assert [len(prompt) for prompt in prompts] == [16] * 4
    assert all(prompt[-2:] == [96, 98] for prompt in prompts)
    assert all(10 <= token < 96 for prompt in prompts for token in prompt[:-2])
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_run_round_reads_every_token(fake_llm: type[FakeLLM]) -> None:
    llm: Any = fake_llm(users=3)
    seen: list[int] = []
    params: Any = Params(max_tokens=5, ignore_eos=True)
    requests = measure.run_round(llm, [[1], [2], [3]], params, seen.append)
    assert [len(request.tokens) for request in requests] == [5, 5, 5]
    assert all(request.submitted <= request.tokens[0] for request in requests)
    assert seen == sorted(seen)


def test_run_round_raises_what_a_user_saw(fake_llm: type[FakeLLM]) -> None:
    llm: Any = fake_llm()
    params: Any = Params(max_tokens=2)
    with pytest.raises(Exception, match="the limit is 400"):
        measure.run_round(llm, [[1] * 500, [2]], params)


def test_peak_memory_is_that_of_this_process() -> None:
    assert 5 < measure.peak_rss_mb() < 1024 * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux has /proc")
def test_fields_of_proc() -> None:
    text = "Name:\tpython kB\nVmHWM:\t  2048 kB\nThreads:\t7\n"
    assert measure.fields(text) == {"VmHWM": 2048}
