"""Many threads share one model: each thread is a user who asks questions and reads the streams.

    python examples/multi_thread_benchmark.py --threads 8 --rounds 2

All threads share one `MultiUserLLM` without locking: it batches the users' next tokens in every
step (continuous batching) and keeps a KV cache per user.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from glm_multiuser import MultiUserLLM, SamplingParams
from glm_multiuser.cli.measure import jain_index, percentile
from glm_multiuser.cli.questions import KNOWN

GLM_TINY = Path(__file__).resolve().parents[1] / "ckpt/glm-tiny"


class Turn(NamedTuple):
    """One finished answer."""

    thread: int
    tokens: int
    seconds: float
    first_token_seconds: float


def talk(llm: MultiUserLLM, thread: int, arguments: argparse.Namespace, turns: list[Turn]) -> None:
    """One user: asks `rounds` questions in sequence."""
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
    for number in range(arguments.rounds):
        question = KNOWN[(thread + number * arguments.threads) % len(KNOWN)].question
        answer, tokens = "", 0
        asked = time.perf_counter()
        first = ended = asked
        for piece in llm.stream_chat(question, user=f"thread {thread}", params=params):
            ended = time.perf_counter()
            first = ended if tokens == 0 else first
            tokens += len(piece.token_ids)
            answer += piece.text
        seconds = ended - asked
        turn = Turn(thread, tokens, seconds, first - asked)
        turns.append(turn)  # list.append is atomic: no lock needed
        # One print per answer, so lines of two threads never mix.
        print(
            f"thread {thread:2}  {tokens:3} tokens  {seconds:5.2f} s  "
            f"{tokens / seconds:6.1f} tok/s  first token {1000 * (first - asked):4.0f} ms  "
            f"{question} -> {' '.join(answer.split())}",
            flush=True,
        )


def print_summary(turns: list[Turn], threads: int, seconds: float) -> None:
    """Prints results per thread, then in total."""
    print(f"\n{'thread':>6} {'answers':>8} {'tokens':>7} {'tok/s':>7} {'first token, worst':>19}")
    rates = []
    for thread in range(threads):
        mine = [turn for turn in turns if turn.thread == thread]
        if not mine:  # its thread failed, and said why
            continue
        tokens = sum(turn.tokens for turn in mine)
        rates.append(tokens / sum(turn.seconds for turn in mine))
        worst = 1000 * max(turn.first_token_seconds for turn in mine)
        print(f"{thread:6} {len(mine):8} {tokens:7} {rates[-1]:7.1f} {worst:16.0f} ms")
    total = sum(turn.tokens for turn in turns)
    first = [1000 * turn.first_token_seconds for turn in turns]
    print(
        f"\n{total} tokens from {threads} threads in {seconds:.2f} s: {total / seconds:.1f} tok/s"
    )
    print(f"first token p50 {percentile(first, 50):.0f} ms, p95 {percentile(first, 95):.0f} ms")
    print(f"fairness between the threads (Jain's index): {jain_index(rates):.3f}")


def positive(text: str) -> int:
    """The value of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; it must be at least 1")
    return value


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", default=str(GLM_TINY))
    parser.add_argument("--threads", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--device-target", default="CPU", choices=["CPU", "Ascend"])
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--seq-length", type=positive, default=512)
    arguments = parser.parse_args()

    with MultiUserLLM.from_pretrained(
        arguments.checkpoint,
        users=arguments.threads,
        seq_length=arguments.seq_length,
        device_target=arguments.device_target,
        device_id=arguments.device_id,
    ) as llm:
        turns: list[Turn] = []
        users = [
            threading.Thread(target=talk, args=(llm, number, arguments, turns))
            for number in range(arguments.threads)
        ]
        started = time.perf_counter()
        for user in users:
            user.start()
        for user in users:
            user.join()
        seconds = time.perf_counter() - started
        stats = llm.stats()
    if turns:
        print_summary(turns, arguments.threads, seconds)
    print(f"{stats.compiles} graphs compiled, {stats.compiles_after_ready} of them after ready")
    return 0 if len(turns) == arguments.threads * arguments.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
