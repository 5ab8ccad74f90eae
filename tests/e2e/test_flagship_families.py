"""The promise of this library for every family, with four models loaded in one process.

Small models with random weights, as the original code has them. Sixteen threads ask all of them at
once: users outnumber slots, come back with longer, edited and shorter prompts, and go away; one
user of each model gets NaN into its slot, free slots are filled with NaN, one model is resized.
Every answer must be the one that the user gets alone, with nothing reused.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Optional

import pytest

from glm_multiuser import (
    CausalConfig,
    GenerationError,
    GenerationResult,
    MultiUserLLM,
    SamplingParams,
)
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine import graph_shapes
from tests.engine.stepping import PATIENCE
from tests.golden_data import golden_folder
from tests.poison import fill_with_nan

FAMILIES = {
    "native": ("chatglm_6b_3layers", "chatglm3_6b", "glm4", "glm4_0414", "llama", "qwen2", "qwen3"),
    "portable": ("chatglm_6b_3layers", "chatglm3_6b", "qwen2", "qwen3"),
}
"""By kernels: MindSpore's operators take several times as long."""
WHOLE_PROMPTS = "chatglm_6b_3layers"
"""The family whose prompts have no log-probabilities, and reuse nothing."""
USERS, USERS_LATER = 3, 5
THREADS_PER_FAMILY = 4
ASKS = {"native": 24, "portable": 12}
"""Of each family, by kernels."""
CLOSEST_CALL = 1e-3
"""Log-probabilities; nearer than that, what is reused could round to another token."""

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
)


@dataclass(frozen=True)
class Ask:
    """One request; its user goes away after `cancel_after` tokens."""

    family: str
    prompt: tuple[int, ...]
    user: Optional[str]
    params: SamplingParams
    cancel_after: Optional[int]


def asks(family: str, kernels: str) -> list[Ask]:
    """Conversations of a few users: prompts that go on from, change or cut what they asked."""
    chance = random.Random(family)
    begun = {name: [chance.randrange(10, 400) for _ in range(40)] for name in "abcde"}
    made = []
    for number in range(ASKS[kernels]):
        user = chance.choice([None, *begun])
        prompt = list(begun[user]) if user else []
        if prompt and number % 4 == 1:
            prompt[chance.randrange(len(prompt))] = 7
        elif number % 4 == 2:
            prompt = prompt[: chance.randrange(1, 30)]
        prompt += [chance.randrange(10, 400) for _ in range(chance.choice((1, 3, 20, 60)))]
        if user:
            begun[user] = prompt[:40]
        settings: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
        if number % 3 == 2:
            # What is reused may differ in its last bits, which a draw could fall between.
            settings = {**SAMPLED[number % len(SAMPLED)], "cache_prompt": False}
        # With the other kernels, such a prompt enters token by token.
        if number % 5 == 4 and family != WHOLE_PROMPTS and kernels == "native":
            settings["prompt_logprobs"] = 1
        params = SamplingParams(
            max_tokens=chance.randrange(4, 24), seed=chance.randrange(2**62), **settings
        )
        cancel_after = chance.choice((0, 1, 4)) if number % 7 == 3 else None
        made.append(Ask(family, tuple(prompt), user, params, cancel_after))
    return made


def open_llm(family: str, kernels: str) -> MultiUserLLM:
    folder = golden_folder(family, "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_shapes, "SMALLEST_PROMPT", 128)  # one graph for whole prompts
        return MultiUserLLM.from_pretrained(
            folder, users=USERS, seq_length=128, prefill_chunk=16, kernels=kernels
        )


def closest_call(result: GenerationResult) -> float:
    best = [sorted(one.top.values(), reverse=True) for one in result.logprobs or ()]
    return min(first - second for first, second in best)


@pytest.fixture(scope="module", params=["native", pytest.param("portable", marks=pytest.mark.rare)])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llms(kernels: str) -> Iterator[dict[str, MultiUserLLM]]:
    with ExitStack() as stack:
        yield {
            family: stack.enter_context(open_llm(family, kernels)) for family in FAMILIES[kernels]
        }


@pytest.fixture(scope="module")
def alone(llms: dict[str, MultiUserLLM], kernels: str) -> dict[Ask, GenerationResult]:
    """Every request by itself, before anybody else asks anything; nothing is reused."""
    answers = {}
    for family, llm in llms.items():
        for ask in asks(family, kernels):
            result = llm.submit(ask.prompt, params=ask.params).result()
            if ask.params.temperature or closest_call(result) > CLOSEST_CALL:
                answers[ask] = result
    return answers


def put_nan(llm: MultiUserLLM, of_user: Optional[str]) -> None:
    """Into every free slot, or into the one in which this user's request runs."""
    runner: Any = llm._runner

    def put() -> None:
        for number, slot in enumerate(llm.slots()):
            chosen = slot.user == of_user if of_user else slot.state == "free"
            if chosen:
                fill_with_nan(runner, number)

    DEVICE_THREAD.call(put)


def talk(llm: MultiUserLLM, ask: Ask) -> GenerationResult:
    handle = llm.submit(ask.prompt, params=ask.params, user=ask.user)
    heard = 0
    while True:
        if heard == ask.cancel_after:
            handle.cancel()
        piece = next(handle, None)
        if piece is None:
            put_nan(llm, None)
            return handle.result()
        heard += len(piece.token_ids)


def poisoned(llm: MultiUserLLM) -> None:
    """A request whose slot gets NaN while it runs ends with an error of its own."""
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    handle = llm.submit([5, 6, 7], params=endless, user="victim")
    next(handle)
    put_nan(llm, "victim")
    with pytest.raises(GenerationError, match="not finite"):
        list(handle)


def test_the_same_answer_alone_and_under_load(
    alone: dict[Ask, GenerationResult], llms: dict[str, MultiUserLLM]
) -> None:
    assert all(llm.stats().batch_invariant for llm in llms.values())
    some_done = threading.Semaphore(0)

    def answer(ask: Ask) -> GenerationResult:
        result = talk(llms[ask.family], ask)
        some_done.release()
        return result

    # The order of each user's requests is kept; the families take turns.
    order = sorted(
        alone, key=lambda ask: [one for one in alone if one.family == ask.family].index(ask)
    )
    with ThreadPoolExecutor(THREADS_PER_FAMILY * len(llms)) as threads:
        answers = {ask: threads.submit(answer, ask) for ask in order}
        victims = [threads.submit(poisoned, llm) for llm in llms.values()]
        for _ in range(len(order) // 2):
            assert some_done.acquire(timeout=PATIENCE)
        assert all(llm.stats().compiles_after_ready == 0 for llm in llms.values())
        llms["qwen2"].resize(USERS_LATER)
        for victim in victims:
            victim.result(PATIENCE)
        results = {ask: future.result(PATIENCE) for ask, future in answers.items()}
    cached = dict.fromkeys(llms, 0)
    for ask, result in results.items():
        expected = alone[ask]
        cached[ask.family] += result.usage.cached_tokens
        assert result.finish_reason in (expected.finish_reason, "cancelled"), ask
        if result.finish_reason == "cancelled":
            assert ask.cancel_after is not None
        else:
            assert len(result.token_ids) == len(expected.token_ids), ask
        assert result.token_ids == expected.token_ids[: len(result.token_ids)], ask
        if result.token_ids:
            assert result.prompt_logprobs == expected.prompt_logprobs, ask
    assert cached.pop(WHOLE_PROMPTS) == 0
    assert all(cached.values()), cached
    for llm in llms.values():
        stats = llm.stats()
        assert (stats.active_users, stats.waiting, stats.compiles_after_ready) == (0, 0, 0)
        assert stats.mean_batch > 1.2


def test_the_answers_are_worth_comparing(alone: dict[Ask, GenerationResult], kernels: str) -> None:
    assert len(alone) > 0.9 * ASKS[kernels] * len(FAMILIES[kernels])
    assert len({result.token_ids for result in alone.values()}) > 0.8 * len(alone)


def test_reuse_is_switched_off_for_an_engine() -> None:
    shape = CausalConfig("qwen2", 64, 32, 1, 2, 1, 16, 32, 64, (1,), 16)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with MultiUserLLM.from_config(shape, users=1, seq_length=32, cache_prompt=False) as llm:
        first, second = (llm.submit([5] * 20, params=params, user="a").result() for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.usage.cached_tokens == 0
