"""Worker side of the measurement protocol: one line of output per line of input.

Imported in every peer's environment, so it uses only the standard library.
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
    """Reads a job, prepares it, and measures once per further line until end of input. Between
    lines it only waits and uses no CPU time.

    Args:
        start: (job, exit stack) -> the ready message and a function that measures once.
    """
    # Libraries print to stdout; only answers may reach the parent process.
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
    """Peak memory of this process, or of the children that it waited for."""
    return resource.getrusage(who).ru_maxrss / 1024


def decode_rate(tokens: list[list[float]]) -> float:
    """tok/s from each user's token times while all users decode: after the last first token, up to
    the earliest last token. A token counts for the part of the gap before it that lies in that
    time, because the tokens of a step are read one after the other.

    Raises:
        ValueError: there was no such time.
    """
    start = max(moments[0] for moments in tokens)
    end = min(moments[-1] for moments in tokens)
    if end <= start:
        raise ValueError("at no time were all users decoding: --new-tokens has to be more")
    gaps = [gap for moments in tokens for gap in zip(moments, moments[1:])]
    return sum(share(*gap, start, end) for gap in gaps) / (end - start)


def share(earlier: float, later: float, start: float, end: float) -> float:
    """The part of a gap that lies between `start` and `end`."""
    if earlier == later:
        return float(start < later <= end)
    return max(0.0, min(later, end) - max(earlier, start)) / (later - earlier)
