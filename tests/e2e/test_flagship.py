"""The promise of this library, for real: the same answer alone and under load.

The small model that comes with the library talks to sixteen threads. There are more users than
slots, some go away, unused slots are filled with NaN while others talk, and the
number of slots changes in the middle. Every answer must be the one that a fresh engine gives to
the same request alone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Union

import pytest

from glm_multiuser import GenerationResult, Handle, MultiUserLLM, Piece, SamplingParams
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine import graph_shapes
from glm_multiuser.engine.graph_runner import GraphRunner
from tests.engine.stepping import PATIENCE, SingleSteps
from tests.poison import fill_with_nan

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "ckpt" / "glm-tiny"
CORPUS = ROOT / "examples" / "train_glm_tiny" / "corpus.jsonl"

USERS, USERS_LATER = 4, 6
THREADS = 16
ASKS = {"native": 48, "portable": 18}
"""By kernels: MindSpore's operators take several times as long."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 8},
    {"temperature": 0.0, "stop": "，"},
    {"temperature": 1.0},
    {"temperature": 1.5, "logprobs": 2},
    {"temperature": 1.2, "top_k": 8},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.1},
)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Ask:
    """One request: `cancel_after` tokens its user goes away."""

    prompt: Union[str, tuple[int, ...]]
    history: tuple[tuple[str, str], ...]
    user: Optional[str]
    params: SamplingParams
    cancel_after: Optional[int]


def questions() -> list[str]:
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["rounds"][0][0] for line in lines]


def asks(kernels: str) -> list[Ask]:
    """More users than slots, short and long prompts, texts and ids, with and without history."""
    chance = random.Random(11)
    texts = questions()
    made = []
    for number in range(ASKS[kernels]):
        prompt: Union[str, tuple[int, ...]] = chance.choice(texts)
        history: tuple[tuple[str, str], ...] = ()
        if number % 6 == 1:
            prompt = tuple(chance.randrange(10, 2000) for _ in range(chance.choice((1, 17, 120))))
        elif number % 6 == 2:
            history = tuple((text, text * 2) for text in chance.sample(texts, 3))
        params = SamplingParams(
            max_tokens=chance.randrange(8, 48),
            seed=chance.randrange(2**62),
            **SETTINGS[number % len(SETTINGS)],
        )
        user = chance.choice([None, *(f"user {name}" for name in range(9))])
        cancel_after = chance.choice((0, 1, 5)) if number % 7 == 3 else None
        made.append(Ask(prompt, history, user, params, cancel_after))
    return made


def needs_the_model() -> None:
    missing = [path for path in (MODEL / "model.safetensors", CORPUS) if not path.is_file()]
    if missing:
        pytest.skip(f"the small model is not here: no {', '.join(map(str, missing))}")


@pytest.fixture(scope="module", params=["native", "portable"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def fewer_graphs() -> Iterator[None]:
    """Of MindSpore's operators: prompts of up to 128 tokens share one length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_shapes, "SMALLEST_PROMPT", 128)
        yield


def open_llm(kernels: str) -> MultiUserLLM:
    return MultiUserLLM.from_pretrained(MODEL, users=USERS, seq_length=256, kernels=kernels)


@pytest.fixture(scope="module")
def alone(kernels: str) -> dict[Ask, GenerationResult]:
    """Every request by itself, one after the other, in an engine of its own."""
    needs_the_model()
    with open_llm(kernels) as llm:
        return {
            ask: llm.submit(
                ask.prompt, params=ask.params, user=ask.user, history=ask.history
            ).result()
            for ask in asks(kernels)
        }


@pytest.fixture(scope="module")
def llm(kernels: str) -> Iterator[MultiUserLLM]:
    needs_the_model()
    with open_llm(kernels) as llm:
        poison_unused_slots(llm)  # unused memory is never read
        yield llm


def runner_of(llm: MultiUserLLM) -> GraphRunner:
    return llm._runner


def poison_unused_slots(llm: MultiUserLLM) -> int:
    """Fills every slot in which nothing runs with NaN; returns how many there were."""
    runner = runner_of(llm)

    def poison() -> int:
        unused = [one for one in range(runner.users) if one not in llm._engine._scheduler.running]
        for slot in unused:
            fill_with_nan(runner, slot)
        return len(unused)

    return DEVICE_THREAD.call(poison)


def ask_and_listen(llm: MultiUserLLM, ask: Ask) -> GenerationResult:
    handle = llm.submit(ask.prompt, params=ask.params, user=ask.user, history=ask.history)
    heard = 0
    while True:
        if heard == ask.cancel_after:
            handle.cancel()
        piece = next(handle, None)
        if piece is None:
            return handle.result()
        heard += len(piece.token_ids)


def under_load(llm: MultiUserLLM, kernels: str) -> tuple[list[tuple[Ask, GenerationResult]], int]:
    """All requests from sixteen threads, and a resize once half of them have ended."""
    half = threading.Semaphore(0)
    poisoned: list[int] = []

    def talk(ask: Ask) -> tuple[Ask, GenerationResult]:
        result = ask_and_listen(llm, ask)
        poisoned.append(poison_unused_slots(llm))
        half.release()
        return ask, result

    with ThreadPoolExecutor(THREADS) as threads:
        answers = [threads.submit(talk, ask) for ask in asks(kernels)]
        for _ in range(ASKS[kernels] // 2):
            assert half.acquire(timeout=PATIENCE)
        assert llm.stats().compiles_after_ready == 0
        llm.resize(USERS_LATER)
        return [answer.result(PATIENCE) for answer in answers], sum(poisoned)


def assert_same_log_probabilities(
    result: GenerationResult, expected: GenerationResult, kernels: str
) -> None:
    if expected.logprobs is None or kernels == "native":
        assert result.logprobs == expected.logprobs
        return
    assert result.logprobs is not None
    for found, wanted in zip(result.logprobs, expected.logprobs):
        # Before and after a resize, steps may have other heights and so other roundings.
        assert found.top == pytest.approx(wanted.top, abs=1e-4)
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_the_same_answer_alone_and_under_load(
    alone: dict[Ask, GenerationResult], llm: MultiUserLLM, kernels: str
) -> None:
    assert llm.stats().kernels == kernels
    assert llm.stats().batch_invariant, "rows of a batch have different bits on this machine"
    answers, poisoned = under_load(llm, kernels)
    assert len(answers) == len(set(alone)) == ASKS[kernels]
    reasons = set()
    for ask, result in answers:
        expected = alone[ask]
        reasons.add(result.finish_reason)
        if result.finish_reason == "cancelled":
            assert ask.cancel_after is not None
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
            continue
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
        assert result.finish_reason == expected.finish_reason
        assert_same_log_probabilities(result, expected, kernels)
    assert reasons == {"stop", "length", "cancelled"}
    assert poisoned > 0
    stats = llm.stats()
    assert stats.users == USERS_LATER
    assert stats.mean_batch > 1.5
    assert stats.compiles_after_ready == 0
    assert stats.batch_invariant
    assert (stats.active_users, stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("weight_dtype", "compute_dtype", "cache_dtype"),
    [
        pytest.param("float32", "float32", "float32", marks=pytest.mark.rare),
        ("bfloat16", "float32", "bfloat16"),
        pytest.param("int8", "bfloat16", "int8", marks=pytest.mark.rare),
        ("int8", "int8", "bfloat16"),
    ],
)
def test_smaller_types_give_the_answers_that_were_learned(
    weight_dtype: str, compute_dtype: str, cache_dtype: str
) -> None:
    """Every dialogue of the corpus, word for word, all at once."""
    needs_the_model()
    rounds = [
        (question, tuple(map(tuple, dialogue[:number])), answer)
        for line in CORPUS.read_text(encoding="utf-8").splitlines()
        for dialogue in [json.loads(line)["rounds"]]
        for number, (question, answer) in enumerate(dialogue)
    ]
    assert len(rounds) > 300
    params = SamplingParams(temperature=0.0, max_tokens=200)
    with MultiUserLLM.from_pretrained(
        MODEL,
        users=16,
        seq_length=512,
        max_queue=len(rounds),
        weight_dtype=weight_dtype,
        compute_dtype=compute_dtype,
        cache_dtype=cache_dtype,
    ) as llm:
        stats = llm.stats()
        assert (stats.weight_dtype, stats.cache_dtype) == (weight_dtype, cache_dtype)
        handles = [
            llm.submit(question, params=params, user=None, history=past)
            for question, past, _ in rounds
        ]
        texts = [handle.result(PATIENCE).text.strip() for handle in handles]
    assert texts == [answer for _, _, answer in rounds]


def test_answers_of_the_model_are_its_own(alone: dict[Ask, GenerationResult], kernels: str) -> None:
    """Else this file would compare one kind of noise with itself."""
    answers = {result.text for ask, result in alone.items() if isinstance(ask.prompt, str)}
    assert len(answers) > ASKS[kernels] // 3
    assert all(result.usage.completion_tokens > 0 for result in alone.values())


def test_defaults_are_those_of_the_checkpoint(llm: MultiUserLLM) -> None:
    values = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert llm.default_params == SamplingParams(
        temperature=0.0, max_tokens=values["max_new_tokens"]
    )


# Going away


def go_away(handle: Handle, how: str) -> None:
    if how == "close":
        handle.close()
    elif how == "leave":
        with handle:
            pass
    elif how == "cancel":
        other = threading.Thread(target=handle.cancel)
        other.start()
        other.join(PATIENCE)


@pytest.mark.parametrize("how", ["close", "leave", "cancel", "drop"])
def test_going_away_frees_the_slot_within_two_steps(llm: MultiUserLLM, how: str) -> None:
    with SingleSteps() as device:
        handle: Optional[Handle] = llm.stream_chat("你好", user="leaving", params=ENDLESS)
        device.step()
        device.step()
        assert handle is not None
        assert [next(handle).finish_reason for _ in range(2)] == [None, None]
        assert llm.stats().active_users == 1
        go_away(handle, how)
        if how == "drop":
            handle = None
            gc.collect()
        device.step()
        device.step()
        assert llm.stats().active_users == 0
    if handle is not None:
        assert handle.result(PATIENCE).finish_reason == "cancelled"


# asyncio


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_several_async_streams_at_once(llm: MultiUserLLM) -> None:
    asked = questions()[:8]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    expected = llm.generate(asked, params)

    async def read(question: str) -> list[Piece]:
        return [piece async for piece in llm.astream_chat(question, params=params)]

    async def all_at_once() -> list[list[Piece]]:
        return await asyncio.gather(*map(read, asked))

    for pieces, whole in zip(run_async(all_at_once()), expected):
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(one for piece in pieces for one in piece.token_ids) == whole.token_ids
        assert pieces[-1].finish_reason == whole.finish_reason


async def elsewhere(work: Callable[[], Any]) -> Any:
    """Blocks a thread instead of the event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def test_cancelling_a_task_frees_the_slot(llm: MultiUserLLM) -> None:
    async def read(heard: asyncio.Event) -> None:
        async for _ in llm.astream_chat("你好", params=ENDLESS):
            heard.set()

    async def cancel_a_task(device: SingleSteps) -> None:
        heard = asyncio.Event()
        task = asyncio.ensure_future(read(heard))
        await asyncio.sleep(0)  # until it waits for its first piece
        await elsewhere(device.step)
        await heard.wait()
        assert llm.stats().active_users == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await elsewhere(device.step)
        await elsewhere(device.step)
        assert llm.stats().active_users == 0

    with SingleSteps() as device:
        run_async(cancel_a_task(device))


def test_a_consumer_that_breaks_out_frees_the_slot(llm: MultiUserLLM) -> None:
    async def break_out(device: SingleSteps) -> None:
        stepping = asyncio.ensure_future(elsewhere(device.step))
        async for piece in llm.astream_chat("你好", params=ENDLESS):
            assert piece.finish_reason is None
            break
        await stepping

    with SingleSteps() as device:
        run_async(break_out(device))
        device.step()
        device.step()
        assert llm.stats().active_users == 0
