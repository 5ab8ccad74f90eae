"""Worker for llama.cpp: runs its `llama-batched-bench` once per measurement."""

from __future__ import annotations

import json
import resource
import subprocess
from contextlib import ExitStack
from typing import Any

from answering import Measure, answer, peak_mb

TRIES = 5
"""With a model that runs for milliseconds, it may exit before its log has the result."""


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    lengths = job["context"], job["new_tokens"]
    # The total is divided among the sequences, in multiples of 256.
    share = -(-sum(lengths) // 256) * 256
    command = [
        job["settings"]["program"],
        *("--model", job["settings"]["model"]),
        *("--threads", str(job["threads"])),
        *("--ctx-size", str(job["users"] * share)),
        *("-npp", str(lengths[0]), "-ntg", str(lengths[1]), "-npl", str(job["users"])),
        *("--output-format", "jsonl"),
        *job["settings"]["options"].split(),
    ]

    def once() -> dict[str, Any]:
        for _ in range(TRIES):
            ended = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
            lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
            if ended.returncode or lines:
                break
        if ended.returncode or len(lines) != 1:
            last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"llama-batched-bench ended with code {ended.returncode}: {last}")
        found = json.loads(lines[0])
        return {
            "decode_tok_s": found["speed_tg"],
            "prefill_s": found["t_pp"],
            "peak_mb": round(peak_mb(resource.RUSAGE_CHILDREN)),
        }

    return {"start_s": 0.0}, once


if __name__ == "__main__":
    answer(start)
