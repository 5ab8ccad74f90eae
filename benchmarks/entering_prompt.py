"""Measures inter-token latency of decoding users while another user's long prompt is prefilled.

    python benchmarks/entering_prompt.py --weight-dtype bfloat16
    python benchmarks/entering_prompt.py --checkpoint MODEL.gguf --prompt-tokens 900

Seven users decode; an eighth submits a prompt. Measures the gaps between tokens of the seven before
the eighth's request and until its first token; the first round is discarded. Weights are random, of
ChatGLM-6B's kind, unless a checkpoint is given. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from statistics import median
from typing import Any, Optional

import numpy as np

from glm_multiuser import Handle, ModelConfig, MultiUserLLM, SamplingParams
from glm_multiuser.cli import screen
from glm_multiuser.cli.bench import random_shape
from glm_multiuser.cli.bench_report import print_conditions
from glm_multiuser.cli.conditions import machine

DECODING, CONTEXT, BEFORE, TIMEOUT = 7, 128, 40, 600.0
"""Users, prompt tokens of each, tokens of each before the eighth's request, seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--weight-dtype", default=None)
    parser.add_argument("--compute-dtype", default="float32")
    parser.add_argument("--prefill-chunk", type=int, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "users": DECODING + 1,
        "seq_length": 1024,
        "kernels": options.kernels,
        "weight_dtype": options.weight_dtype,
        "compute_dtype": options.compute_dtype,
        "prefill_chunk": options.prefill_chunk,
    }
    print_conditions(screen.wide_output(120), {**machine(), **vars(options)})
    with open_llm(options.checkpoint, settings) as llm:
        rounds = [one_round(llm, options.prompt_tokens) for _ in range(options.repeat + 1)][1:]
    for found in rounds:
        screen.notice(
            f"step {found['plain_ms']:.1f} ms, median gap {found['median_ratio']:.2f} steps, "
            f"longest {found['ratio']:.2f}, without a prompt {found['plain_ratio']:.2f}, "
            f"first token after {found['ttft_ms']:.0f} ms"
        )
    usual, longest, plain = (
        median(one[name] for one in rounds) for name in ("median_ratio", "ratio", "plain_ratio")
    )
    print(
        f"gaps while a prompt of {options.prompt_tokens} tokens is prefilled: "
        f"{usual:.2f} steps, at most {longest:.2f}; before it came at most {plain:.2f} "
        f"(medians of {len(rounds)} rounds)"
    )
    print(json.dumps({"conditions": machine(), "options": vars(options), "rounds": rounds}))


def open_llm(checkpoint: Optional[str], settings: dict[str, Any]) -> MultiUserLLM:
    if checkpoint is not None:
        return MultiUserLLM.from_pretrained(checkpoint, **settings)
    shape = random_shape(hidden=1024, layers=12, inner=4096, heads=16, vocab=16384)
    return MultiUserLLM.from_config(ModelConfig(**shape), **settings)


def one_round(llm: MultiUserLLM, prompt_tokens: int) -> dict[str, float]:
    """Times in milliseconds; gaps as multiples of a plain step."""
    random = np.random.default_rng()
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    times: list[list[float]] = [[] for _ in range(DECODING)]
    ready = threading.Barrier(DECODING + 1)

    def read(handle: Handle, seen: list[float]) -> None:
        for _ in handle:
            seen.append(time.perf_counter())
            if len(seen) == BEFORE:
                ready.wait(TIMEOUT)

    handles = [
        llm.submit(
            random.integers(10, 16000, CONTEXT).tolist(), user=f"user {number}", params=endless
        )
        for number in range(DECODING)
    ]
    threads = [threading.Thread(target=read, args=pair) for pair in zip(handles, times)]
    for thread in threads:
        thread.start()
    ready.wait(TIMEOUT)
    begin = time.perf_counter()
    few = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    entering = llm.submit(
        random.integers(10, 16000, prompt_tokens).tolist(), user="new", params=few
    )
    next(entering)
    end = time.perf_counter()
    entering.result()
    for handle in handles:
        handle.cancel()
    for thread in threads:
        thread.join()
    gaps = [pair for seen in times for pair in zip(seen, seen[1:])]
    # No prompt is prefilled in the last steps before the eighth's request. The gap after token
    # BEFORE may be the wait for the other readers.
    settled = max(seen[BEFORE // 4] for seen in times)  # all seven prompts are prefilled
    own = [seen[:BEFORE] for seen in times]
    plain_gaps = [
        after - before
        for seen in own
        for before, after in zip(seen, seen[1:])
        if settled < before and after < begin
    ]
    plain = median(plain_gaps)
    beside = [after - before for before, after in gaps if begin < before < end]
    worst = max(beside)
    return {
        "plain_ms": 1e3 * plain,
        "worst_ms": 1e3 * worst,
        "ratio": worst / plain,
        "plain_ratio": max(plain_gaps) / plain,
        "median_ratio": median(beside) / plain,
        "ttft_ms": 1e3 * (end - begin),
    }


if __name__ == "__main__":
    main()
