"""Table and plot for mindformers_comparison.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from rich.table import Table

from glm_multiuser.cli.bench_plot import heading
from glm_multiuser.cli.bench_report import number

VARIANTS = {
    "int": "MindFormers, int users",
    "tensor": "MindFormers, Tensor user",
    "engine": "MultiUserLLM",
}
COLORS = {"int": "tab:red", "tensor": "tab:orange", "engine": "tab:blue"}

Run = dict[str, Any]
"""`variant`, `users`, the figures, and a `reason` if these are None."""


def times_best_mindformers(run: Run, runs: Sequence[Run]) -> Optional[float]:
    """tok/s as a multiple of the better MindFormers variant with the same number of users."""
    rates = [
        other["tok_s"]
        for other in runs
        if other["users"] == run["users"] and other["variant"] != "engine" and other["tok_s"]
    ]
    return round(run["tok_s"] / max(rates), 3) if rates and run["tok_s"] else None


def table_of(runs: Sequence[Run]) -> Table:
    """One line per combination."""
    table = Table()
    table.add_column("users", justify="right")
    table.add_column("variant")
    for column in (
        "tok/s",
        "times the best\nMindFormers variant",
        "TTFT ms\np50",
        "TTFT ms\nworst",
        "start s",
        "peak\nMB",
        "MB per\nuser",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for place, run in enumerate(runs):
        ttft = run["ttft_ms"] or {"p50": None, "worst": None}
        table.add_row(
            str(run["users"]),
            VARIANTS[run["variant"]],
            number(run["tok_s"]),
            number(times_best_mindformers(run, runs), 2),
            number(ttft["p50"], 0),
            number(ttft["worst"], 0),
            number(run["start_s"]),
            number(run["peak_rss_mb"], 0),
            number(run["mb_per_user"] if run["users"] > 1 else None, 0),
            end_section=any(other["users"] != run["users"] for other in runs[place + 1 :][:1]),
        )
    return table


def plot_comparison(runs: Sequence[Run], conditions: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG with two panels: throughput and the longest TTFT."""
    # Imported here because it is the slowest import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    rates, waits = figure.subplots(1, 2)
    done = sorted((run for run in runs if run["tok_s"]), key=lambda run: run["users"])
    for variant, name in VARIANTS.items():
        mine = [run for run in done if run["variant"] == variant]
        if mine:
            users = [run["users"] for run in mine]
            draw(rates, users, [run["tok_s"] for run in mine], name, COLORS[variant])
            worst = [run["ttft_ms"]["worst"] / 1000 for run in mine]
            draw(waits, users, worst, name, COLORS[variant])
    rates.set(title="All users together", ylabel="tokens per second")
    waits.set(title="The user who waits longest", ylabel="seconds to the first token")
    numbers = sorted({run["users"] for run in done})
    for axes in (rates, waits):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(users) for users in numbers])
        axes.minorticks_off()
        axes.set_xlabel("users (log scale)")
        axes.margins(x=0.16)
        axes.set_ylim(0, axes.dataLim.y1 * 1.2)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
    figure.suptitle(heading(conditions), fontsize=10)
    figure.savefig(path, dpi=120)


def draw(axes: Any, users: Sequence[int], values: Sequence[float], name: str, color: str) -> None:
    """One line, labelled with its last value only: further labels would overlap."""
    axes.plot(users, values, "-o", color=color, label=name)
    axes.annotate(
        f"{values[-1]:.3g}",
        (users[-1], values[-1]),
        textcoords="offset points",
        xytext=(8, 0),
        va="center",
        fontsize=9,
    )
