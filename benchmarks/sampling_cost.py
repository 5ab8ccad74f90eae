"""Measures the cost of sampling, and its share of a decode step of a 6B model.

Only sampling is measured. Of the decode steps, one is computed from published figures, one is a
published figure, one is computed from the read bandwidth measured here.

    python benchmarks/sampling_cost.py [--rows 16] [--vocab 130528] [--repeats 60]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import numpy as np
from numpy.typing import NDArray

from glm_multiuser.sampling import RowSampler, choose
from glm_multiuser.sampling_params import SamplingParams

MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "+ top_k 50": {"top_k": 50},
    "+ top_k 50 + top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "+ top_p 0.9": {"top_p": 0.9},
    "temperature, penalty 1.1": {"repetition_penalty": 1.1},
    "+ top_k 50, penalty 1.1": {"top_k": 50, "repetition_penalty": 1.1},
    "+ top_k 50 + top_p 0.9, penalty 1.1": {
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
    "+ top_p 0.9, penalty 1.1": {"top_p": 0.9, "repetition_penalty": 1.1},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "temperature, logprobs 5": {"logprobs": 5},
    "+ top_k 50, logprobs 5": {"top_k": 50, "logprobs": 5},
}
SEEN_TOKENS = 1000
TEMPERATURE = 0.8
TIMES = ("peaked_ms", "peaked_best_ms", "flat_ms", "flat_best_ms")

WEIGHTS_GB = {"float16": 12.4, "float32": 24.8}
CACHE_USERS, CACHE_TOKENS = 16, 1024
CACHE_KIB_PER_TOKEN = {"float16": 448, "float32": 896}
ASCEND_910A_GB_PER_SECOND = 1200.0
PUBLISHED_STEP_MS = 1000 / 32


def peaked_logits(random: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Mostly unlikely tokens (standard deviation 2.2), 300 plausible ones, and one leading."""
    logits = random.normal(0, 2.2, (rows, vocab))
    for row in logits:
        row[random.choice(vocab, 300, replace=False)] += 4 + random.exponential(2, 300)
        row[random.integers(vocab)] = 18
    return logits.astype(np.float32)


def flat_logits(random: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """All tokens of the same kind: standard deviation 1."""
    return random.normal(0, 1, (rows, vocab)).astype(np.float32)


def times_ms(
    function: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    times = []
    for _ in range(repeats + 3):
        start = clock()
        function()
        times.append((clock() - start) * 1000)
    return times[3:]


def sampling_ms(logits: NDArray[np.float32], wanted: dict[str, Any], repeats: int) -> list[float]:
    """CPU time of the sampling thread, which other processes disturb less than wall time."""
    rows, vocab = logits.shape
    prompt = np.random.default_rng(1).integers(vocab, size=SEEN_TOKENS).tolist()
    samplers = []
    for row in range(rows):
        params = SamplingParams(**{"temperature": TEMPERATURE, "seed": row, **wanted})
        samplers.append(RowSampler(params, prompt, [], vocab))

    def step() -> None:
        for sampler, choice in zip(samplers, choose(logits, samplers)):
            assert choice is not None
            sampler.accept(choice.token_id)

    return times_ms(step, repeats, time.thread_time)


def read_bandwidth(threads: int, mebibytes: int = 512) -> float:
    """Read bandwidth of all threads together, in GB/s."""
    parts = np.array_split(np.ones(mebibytes * 2**18, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        took = min(times_ms(lambda: list(pool.map(np.max, parts)), 10))
    return mebibytes * 2**20 / 1e6 / took


def step_ms(dtype: str, gb_per_second: float) -> tuple[float, str]:
    """The time to read weights and caches once, and its derivation."""
    caches = CACHE_USERS * CACHE_TOKENS * CACHE_KIB_PER_TOKEN[dtype] * 1024 / 1e9
    total = (WEIGHTS_GB[dtype] + caches) / gb_per_second * 1000
    return total, (
        f"({WEIGHTS_GB[dtype]} GB {dtype} weights + {CACHE_USERS} users x {CACHE_TOKENS:,} tokens "
        f"x {CACHE_KIB_PER_TOKEN[dtype]} KiB = {caches:.1f} GB caches) "
        f"/ {gb_per_second:,.0f} GB/s = {total:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=130_528)
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    rows, vocab, repeats = arguments.rows, arguments.vocab, arguments.repeats

    threads = os.cpu_count() or 1
    bandwidth = read_bandwidth(threads)
    conditions = {
        "rows": rows,
        "vocab": vocab,
        "repeats": repeats,
        "temperature": TEMPERATURE,
        "seen_tokens": SEEN_TOKENS,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {threads} CPUs, sampling on one",
        "load_average": round(os.getloadavg()[0], 2),
        "read_gb_per_second": round(bandwidth, 1),
    }
    ascend, ascend_arithmetic = step_ms("float16", ASCEND_910A_GB_PER_SECOND)
    cpu, cpu_arithmetic = step_ms("float32", bandwidth)
    steps = {"ascend_910a_computed": ascend, "published": PUBLISHED_STEP_MS, "cpu_computed": cpu}

    print("Conditions")
    for name, value in conditions.items():
        print(f"  {name}: {value}")
    print("Decode steps of a 6B model that the costs are compared with; none was measured here")
    print(f"  A  Ascend 910A, computed from its peak bandwidth: {ascend_arithmetic}")
    print(f"  B  one user on Ascend, published: 32 tokens/s = {PUBLISHED_STEP_MS:.1f} ms")
    print(f"  C  this CPU, computed from the bandwidth measured above: {cpu_arithmetic}")
    print("\nMilliseconds of one choose(): median and best; the median as a share of A, B, C")
    heads = ("peaked", "best", "flat", "best", "of A", "of B", "of C")
    # The shares are of peaked logits: a model that knows its language gives those.
    print(" " * 37 + "".join(f"{head:>8}" for head in heads))
    random = np.random.default_rng(0)
    logits = {
        "peaked": peaked_logits(random, rows, vocab),
        "flat": flat_logits(random, rows, vocab),
    }
    runs = []
    for mix, wanted in MIXES.items():
        run: dict[str, Any] = {"mix": mix}
        for kind, array in logits.items():
            times = sampling_ms(array, wanted, repeats)
            run[f"{kind}_ms"] = round(statistics.median(times), 3)
            run[f"{kind}_best_ms"] = round(min(times), 3)
        shares = {name: run["peaked_ms"] / step for name, step in steps.items()}
        run["share_of_step"] = {name: round(share, 4) for name, share in shares.items()}
        runs.append(run)
        columns = "".join(f"{run[name]:8.2f}" for name in TIMES)
        columns += "".join(f"{share:>8.2%}" for share in shares.values())
        print(f"{mix:37}{columns}", flush=True)
    steps_ms = {name: round(step, 1) for name, step in steps.items()}
    print(json.dumps({"conditions": conditions, "steps_ms": steps_ms, "runs": runs}))


if __name__ == "__main__":
    main()
