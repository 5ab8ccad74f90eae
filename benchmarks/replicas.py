"""Compares two Ray replicas, one replica, and the server without Ray, on one machine.

    python benchmarks/replicas.py --users 16

Three servers, one after the other, on the same random weights and with the same slots in total:
`glm-multiuser serve` without Ray, with `--replicas 1`, and with `--replicas 2`, where each replica
has half of the slots. All users ask concurrently, `--repeat` times after a warm-up round; rates are
medians. Prompts are token ids, answers are streamed and of a fixed length.

On one machine two replicas share the processors and the memory bus, so this measures what the
ingress and the splitting of a batch cost, not the gain of a second device. The last line of stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from http_cost import http_rate, parse_arguments
from random_checkpoint import write_random_chat_model
from rich.table import Table
from server_process import serve_command, server

from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.bench_run import RunSettings, prompts_of
from glm_multiuser.cli.conditions import machine
from glm_multiuser.errors import GLMMultiUserError

VARIANTS: tuple[tuple[str, int, Sequence[str]], ...] = (
    ("serve", 1, ()),
    ("--replicas 1", 1, ("--replicas", "1")),
    ("--replicas 2", 2, ("--replicas", "2")),
)
"""Name, divisor of the slots, and arguments."""


def main() -> int:
    """Returns the exit code."""
    options = parse_arguments(__doc__, repeat=5)
    if options.users % 2:
        raise GLMMultiUserError(f"--users is {options.users}; two replicas need an even number")
    shape = random_shape(
        options.hidden, options.layers, options.inner, options.heads, options.vocab
    )
    conditions = {**machine(), **shape, **vars(options)}
    console = screen.wide_output(100)
    print_conditions(console, conditions)
    with tempfile.TemporaryDirectory(prefix="glm_multiuser-") as name:
        folder = Path(name) / "random"
        folder.mkdir()
        screen.notice("writing random weights ...")
        write_random_chat_model(folder, shape)
        runs = [run(folder, options, *variant) for variant in VARIANTS]
    table = Table("server", "slots", "tok/s (median)", "tok/s of each round", "of the first")
    for one in runs:
        table.add_row(
            one["server"],
            one["slots"],
            f"{one['tok_s']:.1f}",
            ", ".join(f"{rate:.1f}" for rate in one["rounds"]),
            f"{one['tok_s'] / runs[0]['tok_s']:.2f}",
        )
    console.print(table)
    print(json.dumps({"conditions": conditions, "runs": runs}))
    return 0


def run(
    folder: Path, options: argparse.Namespace, name: str, replicas: int, arguments: Sequence[str]
) -> dict[str, Any]:
    """tok/s of one server."""
    settings = RunSettings(
        users=options.users,
        seq_length=options.seq_length,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        repeat=options.repeat,
        checkpoint=str(folder),
    )
    prompts = prompts_of(settings)
    slots = options.users // replicas
    command = serve_command(folder, slots, options.seq_length, *arguments)
    rounds = []
    with server(name, command, "/v2/health/ready") as url:
        for number in range(options.repeat + 1):
            screen.notice(f"{name}: round {number} of {options.repeat}")
            rate = asyncio.run(http_rate(url, folder.name, prompts, options.new_tokens))
            rounds.append(round(rate, 2))
    kept = rounds[1:]
    return {"server": name, "slots": f"{replicas} x {slots}", "tok_s": median(kept), "rounds": kept}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GLMMultiUserError as error:
        screen.print_error(error)
        sys.exit(2)
