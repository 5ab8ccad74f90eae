"""Tables for compare.py: medians of its measurements, and ratios of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Callable, Optional

from roofline import Roofline, step_seconds
from variants import PAIRS, VARIANTS

Run = dict[str, Any]
"""`variant`, `context`, `users`, `rounds` (decode tok/s, None where a round failed), of the same
rounds `prefill_s` and `read_gb_s`, `reason`."""


def middle(run: Run) -> Optional[float]:
    """Its median decode tok/s; None when no round succeeded."""
    rates = [rate for rate in run["rounds"] if rate is not None]
    return median(rates) if rates else None


Figure = Callable[[Run], Sequence[Optional[float]]]
"""Of each round of a run; more is better."""


def decode_rates(run: Run) -> Sequence[Optional[float]]:
    return list(run["rounds"])


def prompt_rates(run: Run) -> Sequence[Optional[float]]:
    """Prompts of all users per second."""
    return [1 / seconds for seconds in run.get("prefill_s", ())]


def ratio(run: Run, other: Run, figure: Figure = decode_rates) -> Optional[float]:
    """The median of the ratios per round."""
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(figure(run), figure(other))
        if mine is not None and theirs is not None
    ]
    return median(mine / theirs for mine, theirs in pairs) if pairs else None


def summary(
    runs: Sequence[Run], roofline: Optional[Roofline], shape: Mapping[str, int], new_tokens: int
) -> list[Run]:
    """The runs with their medians and shares of the roofline."""
    found = []
    for run in runs:
        rate = middle(run)
        best = roofs(run, roofline, shape, new_tokens)
        shares = [each / most for each, most in zip(run["rounds"], best) if each is not None]
        seconds = run.get("prefill_s")
        prompts = run["users"] * run["context"] / median(seconds) if seconds else None
        figures = {
            "decode_tok_s": None if rate is None else round(rate, 2),
            "prompt_tok_s": None if prompts is None else round(prompts, 1),
            "roofline_tok_s": round(median(best), 2) if best else None,
            "share_of_roofline": round(median(shares), 4) if shares else None,
        }
        found.append({**run, **figures})
    return found


def roofs(
    run: Run, roofline: Optional[Roofline], shape: Mapping[str, int], new_tokens: int
) -> list[float]:
    """tok/s of all users at the roofline, per round, from the read bandwidth of that round."""
    if roofline is None:
        return []
    variant, users = VARIANTS[run["variant"]], run["users"]
    positions = run["context"] + new_tokens / 2
    step = (shape, users, positions, variant.weights, variant.cache_bytes)
    rates = run.get("read_gb_s", ())
    return [users / step_seconds({**roofline, "read_gb_s": rate}, *step) for rate in rates]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with text in the first column and numbers in the others."""
    rules = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rules, *rows))


def cell(run: Optional[Run]) -> str:
    """A rate, with its share of the roofline in brackets."""
    if run is None or run["decode_tok_s"] is None:
        return "-"
    share = run["share_of_roofline"]
    return f"{run['decode_tok_s']:.1f}" + ("" if share is None else f" ({share:.0%})")


def find(runs: Sequence[Run], variant: str, context: int, users: int) -> Optional[Run]:
    wanted = (variant, context, users)
    return next((run for run in runs if key(run) == wanted), None)


def key(run: Run) -> tuple[str, int, int]:
    return run["variant"], run["context"], run["users"]


def rate_table(runs: Sequence[Run], context: int, numbers: Sequence[int]) -> str:
    """Decode tok/s of every variant with results in this context."""
    rows = []
    for name, variant in VARIANTS.items():
        cells = [cell(find(runs, name, context, users)) for users in numbers]
        if set(cells) != {"-"}:
            rows.append([variant.label, *cells])
    head = [f"decode tok/s (of the roofline), context {context}", *users_heads(numbers)]
    return markdown(head, rows)


def prompt_table(runs: Sequence[Run], context: int, numbers: Sequence[int]) -> Optional[str]:
    """Prefill tok/s of all users' prompts, up to the last user's first token; None without
    results."""
    rows = []
    for name, variant in VARIANTS.items():
        found = [find(runs, name, context, users) for users in numbers]
        rates = [run and run["prompt_tok_s"] for run in found]
        if any(rates):
            rows.append(
                [variant.label, *("-" if rate is None else f"{rate:.0f}" for rate in rates)]
            )
    head = [f"prefill, tok/s, context {context}", *users_heads(numbers)]
    return markdown(head, rows) if rows else None


def pair_table(runs: Sequence[Run], context: int, numbers: Sequence[int]) -> Optional[str]:
    """Median ratios of decode rates, for pairs with both measured; None without any."""
    return _pair_table("decode", decode_rates, runs, context, numbers)


def prompt_pair_table(runs: Sequence[Run], context: int, numbers: Sequence[int]) -> Optional[str]:
    """The same for prefill rates."""
    return _pair_table("prefill", prompt_rates, runs, context, numbers)


def _pair_table(
    what: str, figure: Figure, runs: Sequence[Run], context: int, numbers: Sequence[int]
) -> Optional[str]:
    rows = []
    for name, other in PAIRS:
        cells = []
        for users in numbers:
            both = (find(runs, name, context, users), find(runs, other, context, users))
            found = None if None in both else ratio(*both, figure)  # type: ignore[arg-type]
            cells.append("-" if found is None else f"{found:.2f}")
        if set(cells) != {"-"}:
            rows.append([f"{VARIANTS[name].label} ÷ {VARIANTS[other].label}", *cells])
    head = [f"{what}, median ratio of the rounds, context {context}", *users_heads(numbers)]
    return markdown(head, rows) if rows else None


def users_heads(numbers: Sequence[int]) -> list[str]:
    return ["1 user" if users == 1 else f"{users} users" for users in numbers]


def left_out(runs: Sequence[Run]) -> list[str]:
    """One line per reason for missing runs, with the runs affected."""
    missing: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        if run["reason"]:
            what = f"{run['users']} at {run['context']}"
            missing.setdefault((run["variant"], run["reason"]), []).append(what)
    return [
        f"left out: {VARIANTS[variant].label} (users at context: {', '.join(what)}): {reason}"
        for (variant, reason), what in missing.items()
    ]
