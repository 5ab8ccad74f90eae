"""Measures session restore against recomputation, and its effect on other users.

A model of ChatGLM3-6B's width with fewer layers and a small vocabulary: the time of computing and
of restoring grows with the layers. Measures TTFT of a prompt that is computed, and of one whose
session is restored, from memory or from disk (with its pages in the page cache). Then one user
decodes while three others on one slot are saved and restored in turn.

    python benchmarks/sessions.py [--layers 4] [--tokens 1000] [--place disk]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.cli.conditions import machine
from glm_multiuser.cli.published import PUBLISHED

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
DECODED = 160
VOCAB = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", choices=("memory", "disk"), default="memory")
    options = parser.parse_args()
    shape = {"num_layers": options.layers, "vocab_size": VOCAB, "eos_token_ids": ()}
    model = replace(PUBLISHED["chatglm3-6b"], **shape)
    with tempfile.TemporaryDirectory() as folder:
        kept: dict[str, dict[str, Any]] = {
            "memory": {"session_memory": "4GiB"},
            "disk": {"session_dir": folder},
        }
        with MultiUserLLM.from_config(
            model,
            users=2,
            seq_length=options.tokens + 2 * DECODED,
            weight_dtype="bfloat16",
            **kept[options.place],
        ) as llm:
            one = measured(llm, options.tokens, options.rounds)
    faster = one["computed_ms"] / one["restored_ms"]
    print(
        f"{options.tokens} tokens: computed in {one['computed_ms']:.0f} ms, restored from "
        f"{options.place} in {one['restored_ms']:.1f} ms, {faster:.0f} times as fast; longest gap "
        f"{one['longest_gap_steps']:.2f} steps, without others "
        f"{one['longest_gap_alone_steps']:.2f}"
    )
    print(json.dumps({"conditions": machine(), "options": vars(options), "run": one}))


def measured(llm: MultiUserLLM, tokens: int, rounds: int) -> dict[str, float]:
    prompts = {f"user {number}": prompt(number, tokens) for number in range(3)}
    computed = [first_token(llm, user, token_ids) for user, token_ids in prompts.items()]
    # Cycling three users over two slots: LRU eviction has always saved the next one.
    restored = [
        first_token(llm, user, token_ids, cached=tokens - 1)
        for _ in range(rounds)
        for user, token_ids in prompts.items()
    ]
    alone = gaps(llm, prompts, 0)
    beside = gaps(llm, prompts, 1)
    return {
        "computed_ms": 1e3 * median(computed),
        "restored_ms": 1e3 * median(restored),
        "step_ms": 1e3 * median(alone),
        "longest_gap_alone_steps": max(alone) / median(alone),
        "longest_gap_steps": max(beside) / median(alone),
        "restored_sessions": float(llm.stats().sessions.restored),
    }


def prompt(seed: int, tokens: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(10, VOCAB, tokens).tolist()
    return found


def first_token(llm: MultiUserLLM, user: str, token_ids: list[int], cached: int = 0) -> float:
    """Seconds."""
    result = llm.submit(token_ids, user=user, params=ONE).result()
    if result.usage.cached_tokens != cached:
        raise SystemExit(f"{result.usage.cached_tokens} tokens were cached, not {cached}")
    if result.timings.ttft_s is None:
        raise SystemExit("there was no answer")
    return result.timings.ttft_s


def gaps(llm: MultiUserLLM, prompts: dict[str, list[int]], others: int) -> list[float]:
    """A user's inter-token gaps in seconds, while others are saved and restored in another slot."""
    params = replace(ONE, max_tokens=DECODED)
    handle = llm.submit(prompt(99, 16), params=params)
    next(handle)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            for user, token_ids in prompts.items():
                llm.submit(token_ids, user=user, params=ONE).result()

    threads = [threading.Thread(target=come_and_go) for _ in range(others)]
    for thread in threads:
        thread.start()
    times = handle.result().timings.token_times
    ended.set()
    for thread in threads:
        thread.join()
    return [after - before for before, after in zip(times, times[1:])][2:]


if __name__ == "__main__":
    main()
