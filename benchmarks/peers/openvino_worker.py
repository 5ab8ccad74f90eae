"""Worker for OpenVINO GenAI's continuous batching on a GGUF file; one thread runs its steps."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import openvino
import openvino_genai
from answering import Measure, answer, decode_rate

BLOCK = 32
"""Positions per block of its CPU cache."""
BATCHED_TOKENS = 2048
"""Prompt tokens prefilled per step; with the default of 256, the first users would be far ahead."""


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    began = time.perf_counter()
    users, context, new_tokens = job["users"], job["context"], job["new_tokens"]
    steps = -(-users * context // BATCHED_TOKENS)
    pipeline = open_pipeline(job, -(-(context + new_tokens + steps) // BLOCK) + 1)
    random = np.random.default_rng(0)
    vocab = job["shape"]["vocab_size"]

    # Tokens that the first user is ahead when the last prompt is prefilled.
    def once(counted: int = new_tokens) -> dict[str, Any]:
        prompts = random.integers(10, vocab, (users, context), dtype=np.int64)
        return batched_round(pipeline, prompts, counted + steps)

    once(4)  # warm-up
    return {"start_s": round(time.perf_counter() - began, 1)}, once


def open_pipeline(job: dict[str, Any], blocks: int) -> Any:
    """Allocates its blocks at the start; by default this would happen during the measurement."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = job["users"] * blocks
    scheduler.max_num_seqs = job["users"]
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": job["threads"], **job["settings"]["properties"]}
    path = job["settings"]["model"]
    return openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)


def batched_round(pipeline: Any, prompts: Any, new_tokens: int) -> dict[str, Any]:
    """All users submit at once; each generates `new_tokens` tokens."""
    generation = openvino_genai.GenerationConfig()
    generation.max_new_tokens = new_tokens
    generation.ignore_eos = True
    generation.do_sample = False
    began = time.perf_counter()
    handles = [
        pipeline.add_request(number, openvino.Tensor(prompt[None]), generation)
        for number, prompt in enumerate(prompts)
    ]
    tokens: list[list[float]] = [[] for _ in handles]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for times, handle in zip(tokens, handles):
            while handle.can_read():
                for output in handle.read().values():
                    times += [now] * len(output.generated_ids)
    last = max(times[0] for times in tokens)
    ahead = max(sum(moment < last for moment in times) for times in tokens)
    return {"decode_tok_s": decode_rate(tokens), "prefill_s": last - began, "ahead": ahead}


if __name__ == "__main__":
    answer(start)
