"""Plots a plan: users that fit, and the bound of their tokens per second, by sequence length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm_multiuser.errors import ConfigError

MOST_LEVEL = 7
"""Maximum of points with horizontal labels; those of more are slanted."""


def plot_sweep(found: Sequence[Mapping[str, Any]], heading: str, marked: int, path: Path) -> None:
    """Writes a PNG; two panels if the tokens per second are known.

    Args:
        found: "seq_length", "users" and "tokens_per_second" of each length.
        heading: the title.
        marked: the requested length.
        path: of the PNG.

    Raises:
        ConfigError: no user fits at any length.
    """
    # Imported here, because it takes longer than all other imports of the command line.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fitting = [one for one in found if one["users"]]
    if not fitting:
        raise ConfigError(
            "sweep has nothing to draw: cache-memory or device-memory holds no user of any length"
        )
    with_rate = [one for one in fitting if one["tokens_per_second"] is not None]
    figure = Figure(figsize=(11 if with_rate else 6.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if with_rate else 1, squeeze=False)[0]
    draw(panels[0], fitting, "users", marked, "tab:blue")
    panels[0].set(title="Users that fit", ylabel="users (log scale)")
    if with_rate:
        draw(panels[1], with_rate, "tokens_per_second", marked, "tab:orange")
        panels[1].set(
            title="All of them decoding, caches full: at best",
            ylabel="tokens per second, all users (log scale)",
        )
    figure.suptitle(heading, fontsize=10)
    figure.savefig(path, dpi=120)


def draw(
    axes: Any, found: Sequence[Mapping[str, Any]], value: str, marked: int, color: str
) -> None:
    """Draws one line, with its values above the points."""
    lengths = [one["seq_length"] for one in found]
    values = [one[value] for one in found]
    axes.plot(lengths, values, "-o", color=color, markersize=5)
    for length, height in zip(lengths, values):
        axes.annotate(
            f"{height:,.0f}",
            (length, height),
            textcoords="offset points",
            xytext=(5, 6),
            fontsize=9,
            rotation=45 if len(found) > MOST_LEVEL else 0,
            rotation_mode="anchor",
            fontweight="bold" if length == marked else "normal",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    labels = [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths]
    axes.set_xticks(lengths, labels)
    axes.yaxis.set_major_formatter(lambda height, _: f"{height:,.0f}")
    axes.minorticks_off()
    axes.set_xlabel("tokens that each user can hold (log scale)")
    axes.margins(x=0.16, y=0.2)  # room for the last label, right of its point
    axes.grid(alpha=0.3)
