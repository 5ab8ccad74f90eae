"""Measures graph compilation time at start-up, with a cold and a warm compile cache.

    python -m benchmarks.compile_cache [--checkpoint ckpt/chatglm3-tiny] [--users 8]

Each start is a separate process with portable kernels on a CPU. A round is one start with an empty
cache folder and one with the folder that the first start filled. The last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from glm_multiuser import MultiUserLLM
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.conditions import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", default="ckpt/chatglm3-tiny")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        settings = {"users": options.users, "seq_length": options.seq_length}
        print(json.dumps(start(options.checkpoint, compile_cache_dir=options.child, **settings)))
        return
    print_conditions(screen.wide_output(120), {**machine(), **vars(options)})
    rounds = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            empty, full = in_child(folder), in_child(folder)
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        rounds.append((empty["seconds"], full["seconds"]))
        screen.notice(
            f"{empty['graphs']} graphs, {size / 2**20:.1f} MiB: {empty['seconds']:.2f} s, "
            f"then {full['seconds']:.2f} s"
        )
    ratio = median(empty_s / full_s for empty_s, full_s in rounds)
    found = {"compile_s": rounds, "ratio": round(ratio, 2), "graphs": empty["graphs"]}
    print(json.dumps({**machine(), **vars(options), **found}))


def start(checkpoint: str, **settings: Any) -> dict[str, Any]:
    with MultiUserLLM.from_pretrained(checkpoint, kernels="portable", **settings) as llm:
        stats = llm.stats()
        return {"graphs": stats.compiles, "seconds": stats.compile_seconds}


def in_child(folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_cache", *sys.argv[1:], "--child", folder]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
