"""Our engine through its public API: threads that submit and read streams, end to end."""

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
"""Of several users, that may enter in one step; more make no prompt faster."""

SPARE_TOKENS = 8
"""Beside one for every user: so many the first one may get before the last one's prompt is in."""


def start(job: dict[str, Any], at_end: ExitStack) -> tuple[dict[str, Any], Measure]:
    """An engine with as many slots as there are users, as `glm-multiuser bench` has it."""
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
    """When each user's tokens came. Everybody asks at once, and reads until it has got
    `new_tokens` after the last user's first one: prompts enter one after the other, and who came
    in first goes on decoding meanwhile.

    Raises:
        Exception: what the first failed request raised.
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
        time.sleep(0.01)  # or else the next round would find the slots taken
    if failures:
        raise failures[0]
    return tokens


def options(wanted: dict[str, Any], context: int, users: int) -> dict[str, Any]:
    """The fields of `EngineConfig` for this variant.

    Raises:
        ConfigError: this version of the engine lacks one, and the variant is about it.
    """
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    missing = [name for name in wanted if name not in known]
    if missing and wanted != PORTABLE:
        raise ConfigError(f"this version of glm_multiuser has no setting {missing[0]!r}")
    found: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    if wanted["kernels"] == "native":
        # Prompts enter whole: in pieces, the first users would be far ahead of the last.
        together = max(1, min(users, PROMPT_TOKENS // context))
        found["prefill_chunk"] = together * context
    return found


if __name__ == "__main__":
    answer(start)
