"""Compiles every graph for Ascend on a CPU, without a card and without CANN.

    python -m scripts.ascend_dryrun    ends with 1 if a graph has a problem

MindSpore selects a kernel for every operator, lays out device memory and walks through the graphs.
Nothing is computed: docs/ascend.md says what this proves and what it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from scripts.ascend_dryrun import kernels, stubs
from scripts.ascend_dryrun.processes import CARDS, Outcome, compile_family, failed_controls
from scripts.ascend_operators import families


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", choices=families(), help="only this one")
    parser.add_argument("--soc", choices=sorted({soc for soc, _ in CARDS}), help="only this card")
    parser.add_argument("--broken", action="store_true", help="with a softmax that no device has")
    parser.add_argument("--write", action="store_true", help=f"write {kernels.FILE.name}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    arguments = parser.parse_args()
    is_part = bool(arguments.family or arguments.soc or arguments.broken)
    if arguments.write and is_part:
        parser.error(f"--write needs every family and card: {kernels.FILE.name} is of all of them")
    names = [arguments.family] if arguments.family else list(families())
    cards = [card for card in CARDS if arguments.soc in (None, card[0])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            libraries = stubs.build(Path(folder))
        except stubs.DryRunError as error:
            sys.exit(f"no dry run: {error}")
        say(f"stubs of CANN's libraries built in {time.monotonic() - started:.0f} s")
        check_controls(libraries, cards)
        outcomes = compile_all(libraries, cards, names, arguments.jobs, arguments.broken)
    bad = [outcome for outcome in outcomes if outcome.problems]
    for outcome in bad:
        for problem in outcome.problems:
            say(f"{outcome.soc} {outcome.jit_level} {outcome.family}: {problem}")
    found = kernels.of([outcome.kernels for outcome in outcomes])
    say("\n".join(f"{name}: {kind}" for name, kind in found.items()))
    if arguments.write and not bad:
        kernels.write(found)
    changed = [] if bad else kernels.differences(found, kernels.recorded(), is_part)
    for difference in changed:
        say(difference)
    graphs = sum(outcome.graphs for outcome in outcomes)
    seconds = time.monotonic() - started
    if bad:
        sys.exit(f"{len(bad)} of {len(outcomes)} have problems; {seconds:.0f} s")
    if changed:
        sys.exit(f"{kernels.FILE.name} says something else: try --write; {seconds:.0f} s")
    say(f"{graphs} graphs, every operator has a kernel for the card; {seconds:.0f} s")


def check_controls(libraries: Path, cards: Sequence[tuple[str, str]]) -> None:
    """Exits if a control is not detected."""
    for soc, jit_level in cards:
        failed = failed_controls(libraries, soc, jit_level)
        for problem in failed:
            say(f"{soc} {jit_level}: {problem}")
        if failed:
            sys.exit("the controls failed, so this dry run would prove nothing")
        say(f"{soc} {jit_level}: what must be noticed is noticed")


def compile_all(
    libraries: Path, cards: Sequence[tuple[str, str]], names: list[str], jobs: int, broken: bool
) -> list[Outcome]:
    """Runs one process per card and family, and reports each result."""
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(compile_family, libraries, *card, name, broken)
            for card in cards
            for name in names
        ]
        for done, future in enumerate(as_completed(futures), 1):
            one = future.result()
            outcomes.append(one)
            ending = f"{len(one.problems)} problems" if one.problems else "ok"
            what = f"{one.soc} {one.jit_level} {one.family}"
            say(f"[{done}/{len(futures)}] {what}: {one.graphs} graphs, {one.seconds} s, {ending}")
    return sorted(outcomes, key=lambda one: (cards.index((one.soc, one.jit_level)), one.family))


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
