"""Engines around a model in numpy, and what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Callable

from glm_multiuser import MultiUserLLM, SamplingParams
from tests.engine.driving import PATIENCE
from tests.engine.mock_runner import MockRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)

Open = Callable[..., MultiUserLLM]


def runner_of(llm: MultiUserLLM) -> MockRunner:
    runner: Any = llm._runner
    return runner


def prompts_of(llm: MultiUserLLM) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in runner_of(llm).requests_of("prefill")]


def calls_with(llm: MultiUserLLM, prompt: tuple[int, ...]) -> int:
    return sum(
        prompt in {request.prompt_token_ids for request in call.requests.values()}
        for call in runner_of(llm).calls
    )


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))
