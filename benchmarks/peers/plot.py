"""Plot for compare.py: decode tok/s over users, with rooflines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from report import Run
from roofline import Roofline, most_tokens
from variants import VARIANTS

ROOFS = (("float32", 4, "black"), ("bfloat16", 2, "dimgray"))


def plot_runs(
    runs: Sequence[Run],
    roofline: Optional[Roofline],
    conditions: Mapping[str, Any],
    shape: Mapping[str, int],
    path: Path,
) -> None:
    """Writes a PNG with one panel per context."""
    # Imported here because it is the slowest import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    contexts = sorted({run["context"] for run in runs})
    numbers = sorted({run["users"] for run in runs})
    figure = Figure(figsize=(2.6 + 5.4 * len(contexts), 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(panels, contexts):
        draw_rates(axes, [run for run in runs if run["context"] == context])
        draw_roofs(axes, numbers, roofline, shape, context + conditions["new_tokens"] / 2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(numbers, [str(users) for users in numbers])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=f"context {context}", xlabel="users (log scale)")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("decode tokens per second, all users (log scale)")
    labels: dict[str, Any] = {}
    for axes in panels:
        for line, label in zip(*axes.get_legend_handles_labels()):
            labels.setdefault(label, line)
    figure.legend(
        labels.values(), labels.keys(), loc="outside right center", frameon=False, fontsize=9
    )
    figure.suptitle(heading(conditions, shape), fontsize=10)
    figure.savefig(path, dpi=120)


def draw_rates(axes: Any, runs: Sequence[Run]) -> None:
    for name, variant in VARIANTS.items():
        mine = [run for run in runs if run["variant"] == name and run["decode_tok_s"]]
        mine.sort(key=lambda run: run["users"])
        if mine:
            rates = [run["decode_tok_s"] for run in mine]
            style = {"marker": "o", "markersize": 4, **variant.line}
            axes.plot([run["users"] for run in mine], rates, label=variant.label, **style)


def draw_roofs(
    axes: Any,
    numbers: Sequence[int],
    roofline: Optional[Roofline],
    shape: Mapping[str, int],
    positions: float,
) -> None:
    if roofline is None:
        return
    for weights, cache_bytes, color in ROOFS:
        # Also between the measured numbers, to show where the roofline bends.
        places = [numbers[0] * (numbers[-1] / numbers[0]) ** (step / 40) for step in range(41)]
        rates = [
            most_tokens(roofline, shape, users, positions, weights, cache_bytes)  # type: ignore[arg-type]
            for users in places
        ]
        label = f"roofline {weights}"
        axes.plot(places, rates, color=color, linewidth=2.5, alpha=0.5, label=label, zorder=0)


def heading(conditions: Mapping[str, Any], shape: Mapping[str, int]) -> str:
    """The conditions shown in every plot."""
    return (
        f"{shape['num_layers']} layers, hidden {shape['hidden_size']}, inner "
        f"{shape['inner_hidden_size']}, vocabulary {shape['vocab_size']}, "
        f"weights {conditions['weights']}\n"
        f"prompt of the context + {conditions['new_tokens']} new tokens, "
        f"median of {conditions['repeat']}; "
        f"{conditions['cpu']}, {conditions['cores']} cores"
    )
