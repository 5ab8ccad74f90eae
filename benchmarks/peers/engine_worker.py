"""Worker for our engine through its public API: threads submit requests and read streams."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from answering import Measure, answer, decode_rate

from glm_multiuser.cli import bench_run, loading
from glm_multiuser.config import EngineConfig
from glm_multiuser.errors import ConfigError

PORTABLE = {"kernels": "portable", "weight_dtype": "float32"}
PROMPT_TOKENS = 512
"""Prompt tokens of several users prefilled in one step; more do not speed up any prompt."""

SPARE_TOKENS = 8
"""In addition to one per user: tokens of the first user before the last prompt is prefilled."""


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    """An engine with one slot per user, as in `glm-multiuser bench`."""
    os.environ.setdefault("GLOG_v", "3")  # MindSpore: errors, no warnings
    users, context, new_tokens = job["users"], job["context"], job["new_tokens"]
    longest = new_tokens + users + SPARE_TOKENS
    wanted = dict(job["settings"])
    settings = bench_run.RunSettings(
        checkpoint=wanted.pop("model", None),
        users=users,
        seq_length=context + longest,
        prompt_tokens=context,
        new_tokens=longest,
        shape=job["shape"],
        options=options(wanted, context, users),
    )
    began = time.perf_counter()
    llm = at_end.enter_context(bench_run.open_engine(settings))
    prompts = bench_run.prompts_of(settings)
    decode_together(llm, [prompt[-16:] for prompt in prompts], longest, 4)  # warm-up

    def once() -> dict[str, Any]:
        asked = time.perf_counter()
        tokens = decode_together(llm, prompts, longest, new_tokens)
        last = max(moments[0] for moments in tokens)
        ahead = max(sum(moment < last for moment in moments) for moments in tokens)
        found = {"decode_tok_s": decode_rate(tokens), "prefill_s": last - asked}
        return {**found, "ahead": ahead}

    return {"start_s": round(time.perf_counter() - began, 1)}, once


def decode_together(
    llm: Any, prompts: Sequence[Sequence[int]], longest: int, new_tokens: int
) -> list[list[float]]:
    """Arrival times of each user's tokens. All users submit at once and read until they have
    `new_tokens` tokens after the last user's first one: prompts are prefilled one after the other,
    while earlier users already decode.

    Raises:
        Exception: the error of the first failed request.
    """
    params = loading.sampling_params(
        max_tokens=longest, temperature=0.0, ignore_eos=True, cache_prompt=False
    )
    tokens: list[list[float]] = [[] for _ in prompts]
    failures: list[Exception] = []
    ready = threading.Barrier(len(prompts))
    everybody_decodes = threading.Event()

    def user(index: int) -> None:
        ready.wait()
        counted = 0
        try:
            handle = llm.submit(list(prompts[index]), user=f"user {index}", params=params)
            for piece in handle:
                counted += len(piece.token_ids) * everybody_decodes.is_set()
                tokens[index] += [time.perf_counter()] * len(piece.token_ids)
                if all(tokens):
                    everybody_decodes.set()
                if counted >= new_tokens:
                    handle.cancel()
                    break
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=user, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while not failures and llm.stats().active_users:
        time.sleep(0.01)  # until the slots are free for the next round
    if failures:
        raise failures[0]
    return tokens


def options(wanted: dict[str, Any], context: int, users: int) -> dict[str, Any]:
    """The fields of `EngineConfig` for this variant.

    Raises:
        ConfigError: this version of the engine lacks a field that the variant needs.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    missing = [name for name in wanted if name not in known]
    if missing and wanted != PORTABLE:
        raise ConfigError(f"this version of glm_multiuser has no setting {missing[0]!r}")
    found: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    if wanted["kernels"] == "native":
        # Prompts are not chunked: otherwise the first users would be far ahead of the last.
        together = max(1, min(users, PROMPT_TOKENS // context))
        found["prefill_chunk"] = together * context
        if "preallocate_caches" in known:
            found["preallocate_caches"] = True  # as peers do
    return found


if __name__ == "__main__":
    answer(start)
