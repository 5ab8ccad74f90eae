"""Tables and pictures can be read: in a narrow terminal, and with many values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from glm_multiuser.backends.native import library
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench_plot import heading
from glm_multiuser.cli.bench_report import table_of
from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.conditions import machine, workload
from glm_multiuser.cli.plan_plot import plot_sweep
from glm_multiuser.cli.selfcheck import CheckResult, print_report
from tests.cli.test_bench import example_run, tiny


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_numbers_of_a_benchmark_are_never_cut(width: int) -> None:
    console = Console(width=width)
    table = table_of([example_run(users) for users in (1, 32)])
    with console.capture() as capture:
        screen.print_numbers(console, table)
    text = capture.get()
    assert max(map(cell_len, text.splitlines())) <= width
    for column in table.columns:
        assert all(f" {cell} " in text for cell in column.cells)
    assert (text.count("┏") == 1) == (width >= 120)
    assert text.count("users") == text.count("┏")  # every part has the first column


def test_the_roofline_of_a_narrow_terminal(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = run("plan", "--model", "chatglm-6b", "--seq-length", 1024)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert "11.94 GiB" in result.stdout


def test_what_selfcheck_found_is_not_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    reason = "CheckpointError: /a/path/without/any/blank/in/it/model-00001.safetensors"
    print_report([CheckResult("start", "FAILED", reason)])
    cells = [line.split("│")[-2] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert "".join(cells).replace(" ", "") == reason.replace(" ", "")


@pytest.mark.parametrize("count", [5, 7, 11])
def test_values_of_a_plan_do_not_cover_each_other(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = [
        {"seq_length": 128 << at, "users": 1024, "tokens_per_second": 21_314.0}
        for at in range(count)
    ]
    plot_sweep(found, "heading", 1024, tmp_path / "plan.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        for first, second in zip(axes.texts, axes.texts[1:]):
            assert not covers(first, second)
        assert axes.texts[-1].get_window_extent().x1 < axes.bbox.x1


def covers(first: Any, second: Any) -> bool:
    """Whether two texts at the same angle overlap, each begun at its lower left corner."""
    across = math.radians(first.get_rotation())
    step = [
        end - begin
        for begin, end in zip(*(text.axes.transData.transform(text.xy) for text in (first, second)))
    ]
    along = step[0] * math.cos(across) + step[1] * math.sin(across)
    beside = abs(step[1] * math.cos(across) - step[0] * math.sin(across))
    first.set_rotation(0)
    box = first.get_window_extent()
    first.set_rotation(math.degrees(across))
    return bool(along < box.width and beside < box.height)


def test_the_picture_of_a_benchmark_names_the_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable_reason", lambda target: "")
    settings = RunSettings(
        users=1,
        seq_length=64,
        prompt_tokens=16,
        new_tokens=8,
        shape=tiny(1).shape,
        options={"weight_dtype": "int8", "compute_dtype": "int8"},
    )
    conditions = {**machine(), **workload(settings)}
    assert "weights int8, inputs int8, caches bfloat16, native kernels" in heading(conditions)


@pytest.mark.parametrize(("reason", "kernels"), [("", "native"), ("no compiler", "portable")])
def test_conditions_name_the_kernels_that_compute(
    reason: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "unavailable_reason", lambda target: reason)
    assert workload(tiny(1))["kernels"] == kernels
