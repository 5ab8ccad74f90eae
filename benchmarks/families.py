"""Benchmarks every family: decode throughput, ITL during a long prefill, TTFT of a fifth turn.

    python benchmarks/families.py [--families chatglm_6b,llama] [--layers 4]

Scaled-down models of the published shapes with random weights; each family in its own process.
Measures:

1. decode tok/s at 1, 8, 16 and 32 users;
2. the longest inter-token latency of seven decoding users while an eighth's prompt of 1,024 tokens
   is prefilled, as a multiple of their median decode step, in chunks and whole;
3. time to first token of the fifth turn of a chat with 1,000 tokens of history, with and without
   the prefix cache.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from glm_multiuser import CausalConfig, ModelConfig, MultiUserLLM, SamplingParams
from glm_multiuser.cli import measure, screen
from glm_multiuser.cli.conditions import machine
from glm_multiuser.model_config import AnyModelConfig

HIDDEN, HEAD_DIM, VOCAB = 1024, 64, 16384
DECODING_USERS = 7
BASELINE_TOKENS = 100
"""Of each of them, before the long prompt."""
LONG_PROMPT, HISTORY = 1024, 1000
SEQ_LENGTH = 2048
TURNS = 5


CHATGLM2 = {"family": "chatglm2", "rotary_dim": HEAD_DIM // 2, "rotary_interleaved": True}
HALVES = {"rotary_dim": HEAD_DIM}
CAUSAL: dict[str, dict[str, Any]] = {
    "chatglm3": {"num_key_value_heads": 1, "inner_hidden_size": 3424, **CHATGLM2},
    "glm4": {"num_key_value_heads": 2, "inner_hidden_size": 3424, **CHATGLM2},
    "glm4_0414": {
        "num_key_value_heads": 2,
        "inner_hidden_size": 3424,
        **CHATGLM2,
        "family": "glm4_0414",
        "norm_position": "both",
    },
    "llama": {
        "num_key_value_heads": 4,
        "inner_hidden_size": 3584,
        "qkv_bias": False,
        **HALVES,
    },
    "qwen2": {"num_key_value_heads": 2, "inner_hidden_size": 5120, **HALVES},
    "qwen3": {
        "num_key_value_heads": 4,
        "inner_hidden_size": 3072,
        "qkv_bias": False,
        "query_key_norm": True,
        **HALVES,
    },
}
"""The proportions of published models at a hidden size of 1,024."""

FAMILIES = ("chatglm_6b", *CAUSAL)


def model_config(family: str, layers: int) -> AnyModelConfig:
    """A scaled-down model of the family."""
    if family == "chatglm_6b":
        return ModelConfig(VOCAB, HIDDEN, layers, 16, 4 * HIDDEN)
    sizes: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": layers,
        "num_attention_heads": 16,
        "head_dim": HEAD_DIM,
        "max_sequence_length": 8192,
        "eos_token_ids": (VOCAB - 1,),
    }
    return CausalConfig(**{**sizes, **CAUSAL[family]})


def decode_rates(family: str, options: argparse.Namespace) -> dict[str, float]:
    """Users -> total decode tok/s."""
    config = model_config(family, options.layers)
    rates = {}
    for users in options.users:
        with MultiUserLLM.from_config(config, users=users, seq_length=256) as llm:
            prompts = measure.random_prompts(users, 16, VOCAB, ending=())
            found = measure.measure(llm, prompts, 64, options.repeat)
        rates[str(users)] = found["decode_tok_s"]
        screen.notice(f"{family}, {users} users: {rates[str(users)]} tok/s")
    return rates


def greedy(tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **settings)


def long_prompt(llm: MultiUserLLM, repeat: int) -> dict[str, float]:
    """Inter-token gaps of seven users, with and without an eighth's long prompt, in ms."""
    (prompt,) = measure.random_prompts(1, LONG_PROMPT, VOCAB, ending=())
    short = measure.random_prompts(DECODING_USERS, 16, VOCAB, ending=())
    plain, worst = [], []
    for _ in range(repeat):
        readers = [Reader(llm, one, f"user {number}") for number, one in enumerate(short)]
        for reader in readers:
            reader.measured.wait()
        asked = time.perf_counter()
        llm.submit(prompt, user="long", params=greedy(1, cache_prompt=False)).result()
        first = time.perf_counter()
        times = [reader.stop() for reader in readers]
        pairs = [pair for one in times for pair in zip(one, one[1:])]
        # Steps that prefill the seven users' own prompts are no baseline.
        begun = max(one[1] for one in times)
        plain += [end - start for start, end in pairs if begun <= start and end < asked]
        worst.append(max(end - start for start, end in pairs if asked < end and start < first))
    step = median(plain)
    return {
        "decode_step_ms": round(1000 * step, 1),
        "worst_itl_ms": round(1000 * median(worst), 1),
        "worst_itl_steps": round(median(worst) / step, 2),
    }


class Reader(threading.Thread):
    """Reads the tokens of a user who decodes until `stop`."""

    def __init__(self, llm: MultiUserLLM, prompt: Sequence[int], user: str) -> None:
        super().__init__()
        params = greedy(SEQ_LENGTH - len(prompt), cache_prompt=False)
        self._handle = llm.submit(prompt, user=user, params=params)
        self._times: list[float] = []
        self.measured = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            for _ in self._handle:
                self._times.append(time.perf_counter())
                if len(self._times) == BASELINE_TOKENS:
                    self.measured.set()
        finally:
            self.measured.set()  # of an answer that failed: nobody should wait for it

    def stop(self) -> list[float]:
        """Returns when each token was read."""
        self._handle.cancel()
        self.join()
        return self._times


def fifth_turn(llm: MultiUserLLM, repeat: int, reuse: bool) -> dict[str, float]:
    """TTFT of the last of five turns, in ms, and the number of cached tokens."""
    ttft, cached = [], []
    for number in range(repeat):
        pieces = measure.random_prompts(TURNS, HISTORY // (TURNS - 1) - 16, VOCAB, (), number)
        prompt: list[int] = []
        for piece in pieces:
            prompt += piece if piece is not pieces[-1] else piece[:16]
            params = greedy(16, cache_prompt=reuse)
            result = llm.submit(prompt, user=f"chat {number}", params=params).result()
            prompt += result.token_ids
        ttft.append(result.timings.ttft_s or 0.0)
        cached.append(result.usage.cached_tokens)
    return {
        "ttft_ms": round(1000 * median(ttft), 1),
        "prompt_tokens": len(prompt) - 16,
        "cached_tokens": cached[-1],
    }


def measure_family(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one family."""
    result: dict[str, Any] = {"family": family, "decode_tok_s": decode_rates(family, options)}
    config = model_config(family, options.layers)
    if not config.is_causal:
        return result
    common = {"users": DECODING_USERS + 1, "seq_length": SEQ_LENGTH}
    with MultiUserLLM.from_config(config, **common) as llm:
        result["long_prompt_in_chunks"] = long_prompt(llm, options.repeat)
        result["fifth_turn"] = fifth_turn(llm, options.repeat, reuse=True)
        result["fifth_turn_without_reuse"] = fifth_turn(llm, options.repeat, reuse=False)
    with MultiUserLLM.from_config(config, prefill_chunk=LONG_PROMPT, **common) as llm:
        result["long_prompt_whole"] = long_prompt(llm, options.repeat)
    return result


def table(results: Sequence[dict[str, Any]], users: Sequence[int]) -> Table:
    found = Table(title="every family")
    columns = (
        *(f"{one} users" for one in users),
        "worst gap in chunks",
        "whole",
        "5th turn TTFT",
        "without reuse",
    )
    for column in ("family", *columns):
        found.add_column(column, justify="right")
    for result in results:
        cells = [f"{result['decode_tok_s'][str(one)]:,.0f}" for one in users]
        if "fifth_turn" in result:
            cells += [
                f"{result['long_prompt_in_chunks']['worst_itl_steps']} steps",
                f"{result['long_prompt_whole']['worst_itl_steps']} steps",
                f"{result['fifth_turn']['ttft_ms']} ms",
                f"{result['fifth_turn_without_reuse']['ttft_ms']} ms",
            ]
        found.add_row(result["family"], *cells)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--users", default="1,8,16,32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    options.users = [int(one) for one in options.users.split(",")]
    results = []
    for family in options.families.split(","):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results.append(pool.apply(measure_family, (family, options)))
    screen.output().print(table(results, options.users))
    print(json.dumps({"conditions": {**machine(), **vars(options)}, "runs": results}))


if __name__ == "__main__":
    main()
