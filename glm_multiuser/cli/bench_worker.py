"""Runs one measurement in a process of its own: `python -m glm_multiuser.cli.bench_worker`.

Peak memory is per process, and only a fresh process has a true start-up time. Reads one JSON object
(the fields of `RunSettings`) from stdin; the last line of output is another: the run, or
{"error": ...}.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any, Callable

from glm_multiuser.cli.bench_run import RunSettings, run
from glm_multiuser.errors import GLMMultiUserError


def main() -> int:
    """Returns the exit code."""
    return answer_job(lambda job: run(RunSettings(**job)))


def answer_job(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Measures the job from stdin, and prints the result for `bench.run_worker`.

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
    # The parent process handles Ctrl-C and ends this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.exit(main())
