"""Measures single-user tokens per second for each weight type, engines in turn.

    python benchmarks/weight_types.py

All engines are in one process, with the same random weights. A round runs each once; a type's ratio
is the median over the rounds of its rate divided by float32's in the same round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

from glm_multiuser import ModelConfig, MultiUserLLM, SamplingParams
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.conditions import machine

SHAPE = random_shape(hidden=1024, layers=12, inner=4096, heads=16, vocab=16384)
ENGINES: Mapping[str, Mapping[str, str]] = {
    "float32": {"weight_dtype": "float32"},
    "float16": {"weight_dtype": "float16"},
    "bfloat16": {"weight_dtype": "bfloat16"},
    "bfloat16, inputs rounded": {"weight_dtype": "bfloat16", "compute_dtype": "bfloat16"},
}
PROMPT = [*range(100, 114), SHAPE["gmask_token_id"], SHAPE["bos_token_id"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    print_conditions(screen.wide_output(120), {**machine(), **SHAPE, **vars(options)})
    with ExitStack() as stack:
        settings: dict[str, Any] = {"users": 1, "seq_length": 256, "kernels": "native"}
        engines = {
            name: stack.enter_context(
                MultiUserLLM.from_config(ModelConfig(**SHAPE), **settings, **types)
            )
            for name, types in ENGINES.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(options.rounds + 1):
            for name, llm in engines.items():
                rate = decode_rate(llm, options.new_tokens)
                if number:  # the first round warms up
                    rates[name].append(rate)
    for name, found in rates.items():
        ratios = [one / base for one, base in zip(found, rates["float32"])]
        screen.notice(
            f"{name:26} {median(found):6.1f} tok/s, {median(ratios):.2f} times float32 "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(json.dumps({"conditions": machine(), "options": vars(options), "tok_s": rates}))


def decode_rate(llm: MultiUserLLM, new_tokens: int) -> float:
    """Tokens per second after the first token."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens + 1, ignore_eos=True)
    handle = llm.submit(PROMPT, params=params)
    next(handle)
    began = time.perf_counter()
    counted = sum(len(piece.token_ids) for piece in handle)
    return counted / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
