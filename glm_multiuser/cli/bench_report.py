"""Prints a benchmark's conditions, and a table of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_conditions(console: Console, conditions: Mapping[str, Any]) -> None:
    """Prints them in two columns, before anything is measured."""
    table = Table.grid(padding=(0, 2))
    for name, value in conditions.items():
        table.add_row(Text(name.replace("_", " "), "dim"), str(value))
    console.print(table)
    if conditions["load_average"] > conditions["cores"] / 2:
        busy = "Something else is running on this machine (see load average): expect low numbers."
        console.print(Text(busy, "yellow"))
    console.print()


def table_of(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Builds a table with one row per number of users."""
    table = Table()
    for heading in (
        "users",
        "tok/s",
        "decode\ntok/s",
        "tok/s\nper user",
        "TTFT ms\np50/p95/p99",
        "ITL ms\np50/p95/p99",
        "fair-\nness",
        "occu-\npancy",
        "over-\nhead",
        "start s\n(compile)",
        "late\ncompiles",
        "peak\nMB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            str(run["users"]),
            number(run["tok_s"]),
            number(run["decode_tok_s"]),
            number(run["tok_s"] / run["users"]),
            three(run["ttft_ms"]),
            three(run["itl_ms"]),
            number(run["fairness"], 3),
            percent(run["occupancy"]),
            percent(run["overhead_share"]),
            f"{run['start_s']:.1f} ({run['compile_s']:.1f})",
            str(run["compiles_after_ready"]),
            number(run["peak_rss_mb"], 0),
        )
    return table


def number(value: Optional[float], digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.0%}"


def three(values: Optional[Mapping[str, float]]) -> str:
    """Formats p50/p95/p99: whole milliseconds from 10, one decimal below."""
    if values is None:
        return "-"
    return "/".join(
        f"{values[name]:.0f}" if values[name] >= 10 else f"{values[name]:.1f}"
        for name in ("p50", "p95", "p99")
    )
