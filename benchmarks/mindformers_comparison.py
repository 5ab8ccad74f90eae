"""Compares MindFormers' own GLM, patched for many users in two ways, with `MultiUserLLM`.

    python benchmarks/mindformers_comparison.py --users 1,4,8,16

- int: the user is a number; MindFormers compiles one pair of graphs per user.
- tensor: the user is a Tensor: one pair of graphs for all users, one user per call.
- engine: `MultiUserLLM`: the next tokens of all users in one call.

All use the same random weights and prompts, and must generate the same tokens up to the first near
tie. Each combination runs in its own process, one after the other; N threads, one per user, start
at once; decoding is greedy, end of sequence ignored; the first round is discarded. Start-up is the
time from a process with its imports done to the last compiled graph. For the other figures, see the
docstring of glm_multiuser/cli/measure.py. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Optional

from mindformers_report import VARIANTS, Run, plot_comparison, table_of, times_best_mindformers
from random_checkpoint import write_random_weights

from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import parse_users, random_shape, run_worker
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.bench_run import RunSettings, users_text
from glm_multiuser.cli.conditions import machine, workload
from glm_multiuser.cli.measure import fields
from glm_multiuser.errors import ConfigError, GLMMultiUserError
from glm_multiuser.version import installed_version

WORKER = Path(__file__).with_name("mindformers_worker.py")
FIGURES = ("tok_s", "decode_tok_s", "ttft_ms", "start_s", "peak_rss_mb", "mb_per_user")

NEAR_TIE = 1e-3
"""Difference of log-probabilities below which two correct computations may choose differently;
from there on their answers are unrelated."""

RESERVE = 0.1
"""Share of free memory kept in reserve: out of memory, other processes would be killed."""


def main() -> int:
    """Returns the exit code."""
    options = parse_arguments()
    numbers, variants = parse_users(options.users), parse_variants(options.variants)
    settings = RunSettings(
        users=min(numbers),
        seq_length=options.seq_length,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        shape=random_shape(
            options.hidden, options.layers, options.inner, options.heads, options.vocab
        ),
        options={
            "batch_invariant": True,
            "dtype": options.dtype,
            "device_target": options.device_target,
            "device_id": options.device_id,
        },
    )
    versions = {"mindformers": installed_version("mindformers")}
    conditions = {**machine(), **versions, **workload(settings)}
    console = screen.wide_output(120)
    print_conditions(console, conditions)
    with tempfile.TemporaryDirectory(prefix="glm_multiuser-") as folder:
        screen.notice("writing random weights, the same for all ...")
        write_random_weights(Path(folder), settings.shape)
        from_folder = replace(settings, checkpoint=folder, shape={})
        runs, answers, differing = run_all(from_folder, numbers, variants)
    measured = [run for run in runs if run["tok_s"]]
    result = {
        "conditions": conditions,
        "runs": [
            {**run, "times_best_mindformers": times_best_mindformers(run, runs)} for run in runs
        ],
        "tokens_equal": not differing if len(measured) > 1 else None,
        "tokens_differ": differing,
        "near_ties": sum(run["near_ties"] for run in measured),
        "different_answers": len({tuple(tokens) for tokens in answers.values()}),
    }
    screen.print_numbers(console, table_of(runs))
    for run in runs:
        if run["reason"]:
            console.print(f"{title(run['variant'], run['users'])}: {run['reason']}")
    if result["tokens_equal"] is not None:
        console.print(
            f"The tokens of every user are {'NOT ' if differing else ''}the same in all runs; "
            f"answers that part at a near tie: {result['near_ties']}; "
            f"{users_text(len(answers))} got {result['different_answers']} different answers."
        )
    if measured:
        plot_comparison(runs, conditions, options.plot)
        screen.notice(f"plot written to {options.plot}")
    print(json.dumps(result))
    return 1 if differing or any(run["tok_s"] is None and not run["skipped"] for run in runs) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", default="1,4,8,16")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--inner", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=1, help="measured rounds of each run")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    parser.add_argument("--device-target", default="CPU", choices=["CPU", "Ascend"])
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("mindformers_comparison.png"))
    return parser.parse_args()


def parse_variants(text: str) -> list[str]:
    """Parses a list such as "int,engine".

    Raises:
        ConfigError: an unknown variant.
    """
    variants = text.split(",")
    if not set(variants) <= set(VARIANTS):
        raise ConfigError(f"variants is {text!r}; it must be some of {','.join(VARIANTS)}")
    return variants


def run_all(
    settings: RunSettings, numbers: Sequence[int], variants: Sequence[str]
) -> tuple[list[Run], dict[str, list[int]], list[str]]:
    """Runs every combination; returns the runs, each user's tokens, and the mismatches."""
    runs: list[Run] = []
    answers: dict[str, list[int]] = {}
    differing = []
    for users in numbers:
        for variant in variants:
            what = title(variant, users)
            screen.notice(f"{what}: starting and measuring ...")
            started = time.perf_counter()
            run = run_one(variant, replace(settings, users=users), runs)
            runs.append(run)
            if run["tok_s"] is None:
                screen.notice(f"{what}: {run['reason']}")
                continue
            # A user's prompt, and so the answer, is the same at every number of users.
            given, gaps = run.pop("answers"), run.pop("gaps", {})
            answers = {**given, **answers}
            near_ties = [
                is_near_tie(answers[user], tokens, gaps.get(user))
                for user, tokens in given.items()
                if answers[user] != tokens
            ]
            run["near_ties"] = sum(near_ties)
            if not all(near_ties):
                differing.append(what)
                screen.print_error(ValueError(f"{what}: other tokens than before"))
            seconds = time.perf_counter() - started
            screen.notice(f"{what}: {run['tok_s']:.1f} tok/s ({seconds:.0f} s)")
    return runs, answers, differing


def is_near_tie(
    tokens: Sequence[int], others: Sequence[int], gaps: Optional[Sequence[float]]
) -> bool:
    """Whether two answers diverge at a near tie in `others`."""
    where = next(place for place, pair in enumerate(zip(tokens, others)) if pair[0] != pair[1])
    return gaps is not None and gaps[where] < NEAR_TIE


def title(variant: str, users: int) -> str:
    return f"{users_text(users)}, {VARIANTS[variant]}"


def run_one(variant: str, settings: RunSettings, earlier: Sequence[Run]) -> Run:
    """Returns a run, or the reason for skipping it."""
    run: Run = {"variant": variant, "users": settings.users}
    reason = memory_is_short(earlier, settings.users) if variant == "int" else None
    skipped = reason is not None
    if not skipped:
        try:
            job = {"variant": variant, "settings": asdict(settings)}
            figures = run_worker([str(WORKER)], job)
            return {**run, "reason": None, "skipped": False, **figures}
        except GLMMultiUserError as error:
            reason = str(error)
    return {**run, "reason": reason, "skipped": skipped, **dict.fromkeys(FIGURES)}


def memory_is_short(earlier: Sequence[Run], users: int) -> Optional[str]:
    """Why per-user graphs would not fit into memory, extrapolated from the last such run."""
    measured = [run for run in earlier if run["variant"] == "int" and run["tok_s"]]
    free = available_mb()
    if not measured or free is None:
        return None
    last = measured[-1]
    expected = last["peak_rss_mb"] + (users - last["users"]) * last["mb_per_user"]
    if expected <= (1 - RESERVE) * free:
        return None
    return (
        f"would need about {expected:,.0f} MB, to judge by {last['mb_per_user']:,.0f} MB per user "
        f"at {users_text(last['users'])}; {free:,.0f} MB are free"
    )


def available_mb() -> Optional[float]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return fields(text)["MemAvailable"] / 1024
    except (OSError, KeyError):
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GLMMultiUserError as error:
        screen.print_error(error)
        sys.exit(2)
