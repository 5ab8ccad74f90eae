"""`glm-multiuser bench`: the table, the picture, and the last line."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable

import pytest

from glm_multiuser.cli import bench, bench_run, bench_worker, screen
from glm_multiuser.cli.bench_plot import plot_runs
from glm_multiuser.cli.bench_report import print_conditions, table_of
from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.conditions import machine, workload
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError, GLMMultiUserError
from tests.cli.fake import FakeLLM

RUN_KEYS = {
    "users",
    "tok_s",
    "decode_tok_s",
    "ttft_ms",
    "itl_ms",
    "fairness",
    "occupancy",
    "overhead_share",
    "start_s",
    "compile_s",
    "graphs",
    "compiles_after_ready",
    "peak_rss_mb",
}
TINY = ["--hidden", 64, "--layers", 2, "--inner", 256, "--heads", 4, "--vocab", 128]
SHORT = ["--prompt-tokens", 8, "--new-tokens", 8, "--seq-length", 64]


def tiny(users: int) -> RunSettings:
    """Settings as the command makes them."""
    return RunSettings(users, 64, 8, 8, shape=bench.random_shape(64, 2, 256, 4, 128))


def example_run(users: int) -> dict[str, Any]:
    """A run as a worker reports it."""
    percentiles = {"p50": 5.25, "p95": 12.0, "p99": 123.4}
    return {
        "users": users,
        "tok_s": 40.0 * users**0.5,
        "decode_tok_s": None if users > 4 else 50.0 * users**0.5,
        "ttft_ms": percentiles,
        "itl_ms": percentiles,
        "fairness": 0.999,
        "occupancy": 0.97,
        "overhead_share": 0.08,
        "start_s": 6.1,
        "compile_s": 4.2,
        "graphs": 12,
        "compiles_after_ready": 0,
        "peak_rss_mb": 1500.0,
    }


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, fake_llm: type[FakeLLM]) -> list[RunSettings]:
    """Runs the worker here instead of in a child, with the fake model; lists what it was asked."""
    seen: list[RunSettings] = []

    def run(settings: RunSettings) -> dict[str, Any]:
        seen.append(settings)
        return bench_run.run(settings)

    monkeypatch.setattr(bench, "run_in_child", run)
    return seen


def test_conditions_table_and_last_line(
    run: Callable[..., Any], in_this_process: list[RunSettings], tmp_path: Path
) -> None:
    copy = tmp_path / "bench.json"
    result = run("bench", "--users", "1,3", "--no-plot", "--json", copy, *TINY, *SHORT)
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert json.loads(copy.read_text()) == last
    assert [one["users"] for one in last["runs"]] == [1, 3]
    assert all(set(one) == RUN_KEYS for one in last["runs"])
    for one in last["runs"]:
        assert set(one["ttft_ms"]) == set(one["itl_ms"]) == {"p50", "p95", "p99"}
        assert one["tok_s"] > 0
        assert 0 < one["fairness"] <= 1
        assert one["occupancy"] == 1.0
        assert one["overhead_share"] == 0.1
    conditions = last["conditions"]
    assert (conditions["hidden_size"], conditions["num_layers"]) == (64, 2)
    assert conditions["dtype"] == "float32"
    assert conditions["mindspore"]
    # Before the first measurement, a reader knows what is measured.
    assert result.stdout.index("prompt tokens") < result.stdout.index("TTFT")


def test_settings_reach_the_engine(
    run: Callable[..., Any], in_this_process: list[RunSettings], fake_llm: type[FakeLLM]
) -> None:
    words = ["--no-batch-invariant", "--dtype", "float16", "--kernels", "portable"]
    words += ["--no-plot", "--repeat", "2"]
    assert run("bench", "--users", "100", *words, *TINY, *SHORT).exit_code == 0
    (llm,) = fake_llm.opened
    assert llm.closed
    settings = dict(llm.settings)
    config = settings.pop("model_config")
    assert (config.hidden_size, config.bos_token_id, config.eos_token_id) == (64, 126, 127)
    assert settings.pop("seed") == 0
    assert EngineConfig(**settings) == EngineConfig(
        users=100,
        seq_length=64,
        max_queue=100,
        batch_invariant=False,
        dtype="float16",
        kernels="portable",
    )


def test_a_failed_run_leaves_the_others(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(settings: RunSettings) -> dict[str, Any]:
        if settings.users == 2:
            raise GLMMultiUserError("2 users: out of memory")
        return example_run(settings.users)

    monkeypatch.setattr(bench, "run_in_child", sometimes)
    result = run("bench", "--users", "1,2,4", "--no-plot", *TINY, *SHORT)
    assert result.exit_code == 1
    assert "error: 2 users: out of memory" in result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert [one["users"] for one in last["runs"]] == [1, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--users", "1,two"], "users is '1,two'"),
        (["--users", "0"], "users is '0'"),
        (["--new-tokens", 300], "more than seq-length 256"),
        (["--prompt-tokens", 2], "need at least 3"),
        (["--heads", 7], "cannot be split over"),
        (["--checkpoint", "nowhere"], "no checkpoint at nowhere"),
    ],
)
def test_settings_that_cannot_work(
    run: Callable[..., Any], words: list[object], message: str
) -> None:
    result = run("bench", *words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    conditions = {**machine(), **workload(tiny(1))}
    plot_runs([example_run(users) for users in (4, 1, 2, 8)], conditions, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("load", "told"), [(0.3, False), (3.5, True)])
def test_a_busy_machine_is_told(load: float, told: bool) -> None:
    console = screen.wide_output(120)
    with console.capture() as capture:
        print_conditions(console, {**machine(), "cores": 2, "load_average": load})
    assert ("Something else is running" in capture.get()) == told


def test_the_table_fits_into_120_columns() -> None:
    console = screen.wide_output(120)
    with console.capture() as capture:
        console.print(table_of([example_run(users) for users in (1, 32)]))
    text = capture.get()
    assert "…" not in text
    assert "5.2/12/123" in text


def test_the_worker_answers_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_llm: type[FakeLLM]
) -> None:
    settings = tiny(2)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(settings))))
    assert bench_worker.main() == 0
    assert set(json.loads(capsys.readouterr().out)) == RUN_KEYS


def test_the_worker_reports_an_error_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_llm: type[FakeLLM]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("users is 5000; it must be between 1 and 1024")

    monkeypatch.setattr(fake_llm, "from_config", refuse)
    settings = tiny(5000)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(settings))))
    assert bench_worker.main() == 2
    assert "5000" in json.loads(capsys.readouterr().out)["error"]


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    settings = tiny(2)
    with pytest.raises(GLMMultiUserError, match="2 users: its process ended with code 1"):
        bench.run_in_child(settings)


@pytest.mark.slow
def test_a_real_engine_in_a_child_process(run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("glm_multiuser.llm")
    picture = tmp_path / "bench.png"
    result = run("bench", "--users", "2", "--plot", picture, *TINY, *SHORT)
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout.splitlines()[-1])["runs"]
    assert set(one) == RUN_KEYS
    assert one["users"] == 2
    assert one["compiles_after_ready"] == 0
    assert one["tok_s"] > 0
    assert 0 < one["occupancy"] <= 1
    assert 50 < one["peak_rss_mb"] < 8000
    assert picture.read_bytes().startswith(b"\x89PNG")
