"""The library's guarantee, with a numpy model: identical answers alone and under load.

Sixteen threads submit random requests; users outnumber slots, some disconnect early, some get NaN,
and the engine is resized meanwhile. Every answer must equal a fresh engine's answer to the same
request alone, in every token and every bit of the log-probabilities.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.engine.engine import Engine
from glm_multiuser.engine.request import AnonymousUser
from glm_multiuser.sampling import Choice
from tests.engine.driving import PATIENCE, Asked, alone
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, Call, MockRunner

THREADS = 16

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "min_tokens": 3},
    {"temperature": 0.0, "logprobs": 3, "ignore_eos": True},
    {},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1.8, "top_k": 7, "ignore_eos": True},
    {"top_p": 0.8, "repetition_penalty": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_tokens": 5, "stop_token_ids": (4, 5, 6)},
    {"top_p": 0.95, "logprobs": 5, "stop_token_ids": tuple(range(10))},
)


@dataclass(frozen=True)
class Ask:
    """One request of a plan.

    Attributes:
        which: of SETTINGS.
        cancel_after: number of tokens before its user disconnects.
        in_a_hurry: its thread submits the next one before this one has ended.
    """

    prompt: tuple[int, ...]
    user: Optional[int]
    which: int
    seed: int
    max_tokens: int
    cancel_after: Optional[int]
    in_a_hurry: bool

    def params(self) -> dict[str, Any]:
        return {**SETTINGS[self.which], "seed": self.seed, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class Plan:
    asks: tuple[Ask, ...]
    users: int
    users_later: int
    most_prompts: int
    """Short prompts that enter in one step."""
    chunk: Optional[int]
    """Tokens of prompts that enter in one step, as of a causal model whose users' earlier tokens
    are used again; None: whole prompts."""
    resize_at: int
    """Number of the runner's call after which the engine is resized."""


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    begun = draw(st.sampled_from([(), (), (1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 8)]))
    prompt = [*begun, *draw(st.lists(st.integers(0, FAILS_LATER - 1), min_size=1, max_size=6))]
    injected = draw(st.sampled_from([None] * 8 + [FAILS_AT_ONCE, FAILS_LATER]))
    return tuple(prompt if injected is None else [*prompt, injected])


ASKS = st.builds(
    Ask,
    prompt=prompts(),
    user=st.one_of(st.none(), st.integers(0, 9)),
    which=st.integers(0, len(SETTINGS) - 1),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(5, 25),
    cancel_after=st.sampled_from([None, None, None, None, 0, 1, 4]),
    in_a_hurry=st.booleans(),
)
PLANS = st.builds(
    Plan,
    asks=st.lists(ASKS, min_size=THREADS, max_size=3 * THREADS).map(tuple),
    users=st.integers(1, 6),
    users_later=st.integers(1, 6),
    most_prompts=st.integers(1, 4),
    chunk=st.sampled_from([None, None, 1, 3, 16]),
    resize_at=st.integers(1, 60),
)


@functools.cache
def answer_alone(prompt: tuple[int, ...], which: int, seed: int, max_tokens: int) -> Asked:
    return alone(prompt, **SETTINGS[which], seed=seed, max_tokens=max_tokens)


def choices(asked: Asked) -> list[Choice]:
    return [token.choice for token in asked.tokens]


@pytest.fixture(scope="module")
def device_thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.stop()


def listen(engine: Engine, ask: Ask, asked: Asked) -> None:
    """Reads an answer to its end, or cancels it."""
    while asked.end is None:
        if len(asked.tokens) == ask.cancel_after:
            engine.cancel(asked.request)
        asked.next_event()
    asked.wait()


def talk(engine: Engine, asks: Sequence[Ask], answers: list[tuple[Ask, Asked]]) -> None:
    """The work of one thread."""
    unread: list[tuple[Ask, Asked]] = []
    for ask in asks:
        user = AnonymousUser() if ask.user is None else ask.user
        asked = Asked(ask.prompt, user, **ask.params())
        engine.submit(asked.request, wait=True)
        answers.append((ask, asked))
        if ask.in_a_hurry:
            unread.append((ask, asked))
        else:
            listen(engine, ask, asked)
    for ask, asked in unread:
        listen(engine, ask, asked)


def carry_out(
    plan: Plan, thread: DeviceThread, runner_class: type[MockRunner]
) -> tuple[list[tuple[Ask, Asked]], MockRunner]:
    time_to_resize = threading.Event()

    def count_calls(call: Call) -> None:
        if len(runner.calls) >= plan.resize_at:
            time_to_resize.set()

    def talk_to_the_end(asks: Sequence[Ask]) -> None:
        talk(engine, asks, answers)
        if len(answers) == len(plan.asks):
            time_to_resize.set()  # at the latest now

    runner = runner_class(plan.users, count_calls, plan.most_prompts, plan.chunk)
    reuse = plan.chunk is not None
    engine = Engine(runner, plan.users, 8, max_queue_per_user=3, device_thread=thread, reuse=reuse)
    answers: list[tuple[Ask, Asked]] = []
    talkers = [
        threading.Thread(target=talk_to_the_end, args=(plan.asks[number::THREADS],), daemon=True)
        for number in range(THREADS)
    ]
    for talker in talkers:
        talker.start()
    assert time_to_resize.wait(PATIENCE)
    engine.resize(plan.users_later, lambda *args: None)
    for talker in talkers:
        talker.join(PATIENCE)
    assert not any(talker.is_alive() for talker in talkers), "a request never ended"
    assert engine.numbers()[::2] == (0, 0)
    engine._scheduler.check()
    engine.close(drain=0.0)
    return answers, runner


@pytest.mark.slow
@pytest.mark.parametrize("runner_class", [MockRunner, MixedRunner])
@settings(
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=PLANS)
def test_the_same_answer_alone_and_under_load(
    plan: Plan, device_thread: DeviceThread, runner_class: type[MockRunner]
) -> None:
    answers, runner = carry_out(plan, device_thread, runner_class)
    assert len(answers) == len(plan.asks)
    for ask, asked in answers:
        expected = answer_alone(ask.prompt, ask.which, ask.seed, ask.max_tokens)
        if asked.reason == "cancelled":
            assert ask.cancel_after is not None
            assert choices(asked) == choices(expected)[: len(asked.tokens)]
            continue
        assert choices(asked) == choices(expected)
        assert asked.reason == expected.reason
    assert len(runner.threads) == 1
    assert len(runner.memory) == plan.users_later
    for call in runner.calls:
        users = [request.user for request in call.requests.values()]
        assert len(users) == len(set(users))
