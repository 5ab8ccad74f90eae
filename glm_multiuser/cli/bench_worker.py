"""Runs one measurement in a process of its own: `python -m glm_multiuser.cli.bench_worker`.

A process never gives its peak memory back, and only a fresh one shows a true start-up time. Reads
one JSON object (the fields of `RunSettings`) from stdin; the last line that it prints is another:
the run, or {"error": ...}.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, Callable

from glm_multiuser.cli.bench_run import RunSettings, run
from glm_multiuser.errors import GLMMultiUserError


def main() -> int:
    """The exit code."""
    return answer_job(lambda job: run(RunSettings(**job)))


def answer_job(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Measures what stdin asks for, and prints it for `bench.run_worker`.

    Returns:
        The exit code: 0, or 2 after an error.
    """
    try:
        result = measure(json.load(sys.stdin))
    except GLMMultiUserError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    # The command, which has started this process, ends it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.exit(main())
