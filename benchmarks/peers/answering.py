"""The worker's side of a measurement: answers one line for each line that it reads.

Imported in the environment of every peer, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import ExitStack
from typing import Any, Callable

Measure = Callable[[], "dict[str, Any]"]
Start = Callable[["dict[str, Any]", ExitStack], "tuple[dict[str, Any], Measure]"]


def answer(start: Start) -> None:
    """Reads a job, gets ready for it, and measures once for every further line, until there is
    none. In between it waits for the next line and takes no time from the others.

    Args:
        start: (job, what to do at the end) -> what to say when ready, and what measures once.
    """
    # Libraries print what they like to stdout; only answers may go to who asks.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        with ExitStack() as at_end:
            ready, measure = start(json.loads(sys.stdin.readline()), at_end)
            print(json.dumps(ready), file=answers)
            for _ in sys.stdin:
                found = measure()
                print(json.dumps({"peak_mb": round(peak_mb()), **found}), file=answers)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0]}"
        print(json.dumps({"error": text}), file=answers)


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    """The most memory that this process, or one that it waited for, ever held."""
    return resource.getrusage(who).ru_maxrss / 1024


def decode_rate(tokens: list[list[float]]) -> float:
    """tok/s while everybody decodes, of the moments at which each user's tokens came: after the
    last user's first token, up to the first user's last one.

    Raises:
        ValueError: there was no such time.
    """
    start = max(moments[0] for moments in tokens)
    end = min(moments[-1] for moments in tokens)
    if end <= start:
        raise ValueError("at no time were all users decoding: --new-tokens has to be more")
    return sum(start < moment <= end for moments in tokens for moment in moments) / (end - start)
