"""Plots a benchmark: total and per-user throughput against the number of users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional


def plot_runs(runs: Sequence[Mapping[str, Any]], conditions: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG with two panels."""
    # Imported here, because it takes longer than all other imports of the command line.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(runs, key=lambda run: run["users"])
    users = [run["users"] for run in ordered]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    total, single = figure.subplots(1, 2)
    draw(total, users, [run["tok_s"] for run in ordered], "prefill and decode", "tab:blue", -15)
    decoding = [(run["users"], run["decode_tok_s"]) for run in ordered if run["decode_tok_s"]]
    if decoding:
        total.plot(*zip(*decoding), "--s", color="tab:gray", markersize=4, label="decode only")
    total.set(title="All users together", ylabel="tokens per second")
    total.legend(frameon=False, loc="upper left")
    draw(single, users, [run["tok_s"] / run["users"] for run in ordered], None, "tab:orange", 8)
    single.set(title="Each user", ylabel="tokens per second per user")
    for axes in (total, single):
        axes.set_ylim(0, axes.dataLim.y1 * 1.2)
    figure.suptitle(heading(conditions), fontsize=10)
    figure.savefig(path, dpi=120)


def draw(
    axes: Any,
    users: Sequence[int],
    values: Sequence[float],
    label: Optional[str],
    color: str,
    above: int,
) -> None:
    """Draws one line, with its values above or below the points."""
    axes.plot(users, values, "-o", color=color, label=label)
    for place, value in zip(users, values):
        axes.annotate(
            f"{value:.0f}" if value >= 10 else f"{value:.1f}",
            (place, value),
            textcoords="offset points",
            xytext=(0, above),
            ha="center",
            fontsize=9,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(place) for place in users])
    axes.minorticks_off()
    axes.set_xlabel("users (log scale)")
    axes.margins(x=0.08)
    axes.grid(alpha=0.3)


def heading(conditions: Mapping[str, Any]) -> str:
    """Returns the conditions of the measurement."""
    inputs = conditions["compute_dtype"]
    return (
        f"{conditions['num_layers']} layers, hidden {conditions['hidden_size']}, "
        f"weights {conditions['weight_dtype']}, "
        + (f"inputs {inputs}, " if inputs != "float32" else "")
        + f"caches {conditions['cache_dtype']}, {conditions['kernels']} kernels on "
        f"{conditions['device_target']}, "
        f"prompt {conditions['prompt_tokens']} + {conditions['new_tokens']} new tokens\n"
        f"{conditions['cpu']}, {conditions['cores']} cores; mindspore {conditions['mindspore']}"
    )
