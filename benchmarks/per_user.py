"""Measures the cost of one more user: graphs, compile time and memory, at several user counts.

Each user count runs in its own process, with a small random model. Memory per added user is
compared with the KV cache size computed from the configuration.

    python benchmarks/per_user.py [--users 2,8,32,64] [--hidden 512] [--layers 4] [--seq-length 512]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from glm_multiuser.cli.bench import random_shape, run_in_child
from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.conditions import machine

BYTES_PER_VALUE = 4  # float32, the default on CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", default="2,8,32,64")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=512)
    options = parser.parse_args()

    shape = random_shape(options.hidden, options.layers, 4 * options.hidden, 8, 512)
    user_mib = 2 * options.layers * options.seq_length * options.hidden * BYTES_PER_VALUE / 2**20
    runs = []
    print(f"a user's keys and values: {user_mib:.2f} MiB")
    print("users  graphs  compile s  peak MiB  MiB per added user  / its keys and values")
    for users in [int(text) for text in options.users.split(",")]:
        settings = RunSettings(
            users, options.seq_length, prompt_tokens=16, new_tokens=32, shape=shape
        )
        run = {**run_in_child(settings), "added_mib_per_user": None, "ratio": None}
        added = ""
        if runs:
            before = runs[-1]
            per_user = (run["peak_rss_mb"] - before["peak_rss_mb"]) / (users - before["users"])
            run.update(added_mib_per_user=per_user, ratio=per_user / user_mib)
            added = f"{per_user:17.2f}  {per_user / user_mib:20.2f}"
        print(
            f"{users:5}  {run['graphs']:6}  {run['compile_s']:9.1f}  "
            f"{run['peak_rss_mb']:7.0f}  {added}",
            flush=True,
        )
        runs.append(run)
    conditions = {**machine(), **asdict(settings)}
    print(json.dumps({"conditions": conditions, "user_mib": user_mib, "runs": runs}))


if __name__ == "__main__":
    main()
