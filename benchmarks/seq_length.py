"""Measures whether a long `seq_length` slows short conversations; only used positions are read.

The same traffic runs on engines that differ only in `seq_length`, in turn, several times, each in
its own process; medians are compared.

    python benchmarks/seq_length.py [--users 16] [--seq-lengths 256,1024] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from statistics import median

from glm_multiuser.cli.bench import random_shape, run_in_child
from glm_multiuser.cli.bench_run import RunSettings
from glm_multiuser.cli.conditions import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seq-lengths", default="256,1024")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()

    shape = random_shape(1024, options.layers, 4096, 16, 16384)
    lengths = [int(text) for text in options.seq_lengths.split(",")]
    rates: dict[int, list[float]] = {length: [] for length in lengths}
    for round_number in range(options.rounds):
        for length in lengths:
            settings = RunSettings(
                options.users, length, options.prompt_tokens, options.new_tokens, shape=shape
            )
            rates[length].append(run_in_child(settings)["tok_s"])
            print(f"round {round_number}: seq_length {length}: {rates[length][-1]:.1f} tok/s")
    medians = {length: median(values) for length, values in rates.items()}
    ratios = {length: medians[lengths[0]] / medians[length] for length in lengths}
    for length in lengths:
        print(f"seq_length {length}: {medians[length]:.1f} tok/s, {ratios[length]:.2f} x the time")
    conditions = {**machine(), **asdict(settings)}
    print(json.dumps({"conditions": conditions, "tok_s": rates, "time_ratio": ratios}))


if __name__ == "__main__":
    main()
