"""Measures an engine from outside, as its users see it.

Definitions (all times are taken in the threads that read the tokens, so they include delivery from
the engine to the user):

- **TTFT**, time to first token: from calling `submit` to reading the request's first token. Waiting
  for a slot and prefill are included.
- **ITL**, inter-token latency: the gaps between consecutive tokens of a request. The first token
  has no gap, so prefill is excluded (unlike TPOT of some tools).
- **tok_s**: all generated tokens / (last token of all - first `submit`), including prefill.
- **decode_tok_s**: tokens read while every user was decoding (after the last user's first token, up
  to the first user's last token) / that time. A token counts for the part of the gap before it that
  lies in that time, because the tokens of a step are read one after the other. None if there was no
  such time.
- **fairness**: Jain's index of the per-user tok/s, (sum x)^2 / (n * sum x^2): 1 if all are
  equal, 1/n if one user has everything. R. Jain, D. Chiu, W. Hawe, "A quantitative measure of
  fairness and discrimination for resource allocation in shared computer systems", DEC-TR-301, 1984.
- **occupancy**: mean rows of a decode step / users.
- **overhead_share**: the engine's time outside the graph / its time in and outside the graph.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser.cli import loading

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.sampling_params import SamplingParams
    from glm_multiuser.stats import EngineStats

WARM_UP_TOKENS = 16
PROGRESS_SECONDS = 0.2


@dataclass(frozen=True)
class RequestTimes:
    """Times at which a request was submitted and its tokens were read, on one clock."""

    submitted: float
    tokens: tuple[float, ...]

    @property
    def first_token_seconds(self) -> float:
        return self.tokens[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:])]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / (self.tokens[-1] - self.submitted)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolates linearly between the two nearest values, like numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles_ms(seconds: Sequence[float]) -> Optional[dict[str, float]]:
    """Returns p50, p95 and p99 in milliseconds; None without values."""
    if not seconds:
        return None
    return {
        f"p{percent}": round(1000 * percentile(seconds, percent), 3) for percent in (50, 95, 99)
    }


def jain_index(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all values are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def total_rate(requests: Sequence[RequestTimes]) -> float:
    """tok_s of one round."""
    start = min(request.submitted for request in requests)
    end = max(request.tokens[-1] for request in requests)
    return sum(len(request.tokens) for request in requests) / (end - start)


def decode_rate(requests: Sequence[RequestTimes]) -> Optional[float]:
    """decode_tok_s of one round."""
    start = max(request.tokens[0] for request in requests)
    end = min(request.tokens[-1] for request in requests)
    if end <= start:
        return None
    gaps = [gap for request in requests for gap in zip(request.tokens, request.tokens[1:])]
    return sum(share(*gap, start, end) for gap in gaps) / (end - start)


def share(earlier: float, later: float, start: float, end: float) -> float:
    """The part of a gap that lies between `start` and `end`."""
    if earlier == later:
        return float(start < later <= end)
    return max(0.0, min(later, end) - max(earlier, start)) / (later - earlier)


def random_prompts(
    count: int, length: int, vocab_size: int, ending: Sequence[int], seed: int = 0
) -> list[list[int]]:
    """Returns reproducible prompts of `length` ids, including the special ids of `ending`."""
    source = random.Random(seed)
    ordinary = range(min(10, vocab_size - 1), max(min([*ending, vocab_size]), 11))
    body = max(length - len(ending), 0)
    return [source.choices(ordinary, k=body) + list(ending) for _ in range(count)]


def user_name(index: int) -> str:
    """Returns the user of prompt number `index`."""
    return f"bench {index}"


def run_round(
    llm: MultiUserLLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> list[RequestTimes]:
    """Submits all prompts concurrently, each from its user's thread, and reads the answers.

    `on_progress` is called a few times a second with the number of tokens read so far, outside the
    measured threads.

    Raises:
        Exception: that of the first failed request.
    """
    together = threading.Barrier(len(prompts))
    submitted = [0.0] * len(prompts)
    tokens: list[list[float]] = [[] for _ in prompts]
    failures: list[Exception] = []

    def user(index: int) -> None:
        together.wait()
        submitted[index] = time.perf_counter()
        try:
            for piece in llm.submit(list(prompts[index]), user=user_name(index), params=params):
                now = time.perf_counter()
                tokens[index].extend(now for _ in piece.token_ids)
        except Exception as error:
            failures.append(error)

    threads = [
        threading.Thread(target=user, args=(index,), daemon=True) for index in range(len(prompts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(PROGRESS_SECONDS)
            on_progress(sum(map(len, tokens)))
    if failures:
        raise failures[0]
    return [RequestTimes(start, tuple(times)) for start, times in zip(submitted, tokens)]


def measure(
    llm: MultiUserLLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    repeat: int = 1,
    on_progress: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Any]:
    """Performs one run of the benchmark: a warm-up round, then `repeat` rounds.

    Each prompt has its own user. Greedy, end of sequence ignored, every answer exactly `new_tokens`
    long. Rates are medians over rounds; latencies are percentiles over all rounds together.
    """
    users = len(prompts)

    def params(tokens: int) -> SamplingParams:
        # All rounds have the same prompts, which the prefix cache would shorten.
        return loading.sampling_params(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_prompt=False
        )

    run_round(llm, prompts, params(min(WARM_UP_TOKENS, new_tokens)))
    before = llm.stats()
    rounds: list[list[RequestTimes]] = []
    for number in range(repeat):
        earlier = number * users * new_tokens
        rounds.append(
            run_round(
                llm,
                prompts,
                params(new_tokens),
                lambda tokens, earlier=earlier: on_progress(earlier + tokens),  # type: ignore[misc]
            )
        )
    after = llm.stats()
    return {"users": users, **summary(rounds), **engine_summary(before, after, users, repeat)}


def summary(rounds: Sequence[Sequence[RequestTimes]]) -> dict[str, Any]:
    """Summarises the users' measurements."""
    decode_rates = [rate for rate in map(decode_rate, rounds) if rate is not None]
    requests = [request for requests in rounds for request in requests]
    fairness = [jain_index([one.tokens_per_second for one in requests]) for requests in rounds]
    return {
        "tok_s": round(median(map(total_rate, rounds)), 2),
        "decode_tok_s": round(median(decode_rates), 2) if decode_rates else None,
        "ttft_ms": percentiles_ms([request.first_token_seconds for request in requests]),
        "itl_ms": percentiles_ms([gap for request in requests for gap in request.gaps]),
        "fairness": round(median(fairness), 4),
    }


def engine_summary(
    before: EngineStats, after: EngineStats, users: int, rounds: int
) -> dict[str, Any]:
    """Summarises the engine's counters between two `stats()`, the first after the warm-up."""
    graph = after.graph_seconds - before.graph_seconds
    overhead = after.overhead_seconds - before.overhead_seconds
    # The first token of every request comes from its prefill; all others are rows of decode steps.
    rows_before = before.tokens_generated - users
    rows_after = after.tokens_generated - users * (rounds + 1)
    steps = rows_after / after.mean_batch - rows_before / before.mean_batch
    return {
        "occupancy": round((rows_after - rows_before) / steps / users, 4),
        "overhead_share": round(overhead / (graph + overhead), 4),
        "start_s": round(after.start_seconds, 3),
        "compile_s": round(after.compile_seconds, 3),
        "graphs": after.compiles,
        "compiles_after_ready": after.compiles_after_ready,
    }


def peak_rss_mb() -> float:
    """Returns the peak RSS of this process, in MiB.

    On Linux, `ru_maxrss` is inherited from the program that started this one; VmHWM is reset, so it
    is preferred.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return fields(lines)["VmHWM"] / 1024
    except (OSError, KeyError):
        import resource
        import sys

        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def fields(text: str) -> Mapping[str, int]:
    """Parses `name: 123 kB` lines of files in /proc, to kB."""
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    return {
        name: int(value.split()[0])
        for name, value in pairs
        if value.strip().endswith("kB") and value.split()[0].isdigit()
    }
