"""The processes of the dry run, and their results."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.ascend_dryrun import log, stubs
from scripts.ascend_dryrun.controls import CONTROLS

ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = ("8:8:512", "32:32:32", "8:4:32", "8:1:32")
"""users:users_per_cell:seq_length. The first has every kind of graph, with two blocks of positions
and chunks of up to 256 tokens."""

CARDS = (("ascend910", "O0"), ("ascend910b", "O0"), ("ascend910", "O2"))
"""The names of the 910A and the 910B, and `jit_level`. A 910A takes O2 by default, a 910B O0."""


@dataclass(frozen=True)
class Outcome:
    """One family's graphs for one card.

    Attributes:
        seconds: by the wall clock.
        problems: each with its graph, if known.
    """

    soc: str
    jit_level: str
    family: str
    graphs: int
    seconds: float
    kernels: dict[str, str]
    problems: list[str]


def compile_family(
    folder: Path, soc: str, jit_level: str, family: str, broken: bool = False
) -> Outcome:
    """Compiles every graph of a family; with O2 only the first layout.

    Args:
        broken: replaces softmax by an invented operator, which must be reported; only the first
            layout.
    """
    layouts = LAYOUTS if jit_level == "O0" and not broken else LAYOUTS[:1]
    options = ["--broken"] if broken else []
    started = time.monotonic()
    lines, text, code = start("graphs", folder, soc, jit_level, family, *layouts, *options)
    found = log.read(text)
    problems = [
        f"{line['layout']}, {line['graph']}: {line['problem']}" for line in lines if line["problem"]
    ]
    problems += found.problems
    if code:
        problems.append(f"the process ended with exit code {code}: {text[-500:]}")
    if not lines:
        problems.append("no graph was compiled")
    if jit_level == "O0" and not found.kernels:
        problems.append("MindSpore's log names no kernel")
    seconds = round(time.monotonic() - started, 1)
    return Outcome(soc, jit_level, family, len(lines), seconds, found.kernels, problems)


def failed_controls(folder: Path, soc: str, jit_level: str) -> list[str]:
    """The failed controls, one sentence each."""
    lines, text, _ = start("controls", folder, soc, jit_level)
    noticed = {line["control"]: line["problem"] for line in lines}
    in_log = log.read(text).problems
    failed = []
    for name, (_, expected) in CONTROLS[jit_level].items():
        if name not in noticed:
            failed.append(f"{name}: the process ended before it: {text[-500:]}")
        elif expected == "" and noticed[name]:
            failed.append(f"{name}: {noticed[name]}")
        elif not any(expected in one for one in (noticed[name], *in_log)):
            failed.append(f"{name} was not noticed")
    return failed


def start(module: str, folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str, int]:
    """Returns a process' lines of JSON, MindSpore's log, and the exit code."""
    environment = stubs.environment(folder, PYTHONPATH=str(ROOT))
    with tempfile.TemporaryDirectory() as work:  # MindSpore writes files where it is started
        result = subprocess.run(
            [sys.executable, "-m", f"scripts.ascend_dryrun.{module}", str(folder), *arguments],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return lines, result.stderr, result.returncode
