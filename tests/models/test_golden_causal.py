"""Logits and greedy tokens of the causal families are those of the original code.

What runs is the engine's own runner, call by call, so that every logit can be compared: prompts
whole and in chunks, one cell for all users and one for each, alone and beside others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Optional

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_multiuser import device
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model
from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.config import EngineConfig
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.portable import ChunkedPrefillRunner
from glm_multiuser.engine.request import Request
from glm_multiuser.weights import load_weights, weights_of
from tests.models.golden_cases import Case, check_answer, read_reference, worst
from tests.models.portable_driver import SHORT, PortableDriver

pytestmark = pytest.mark.slow

LONG = 640
WHOLE, CHUNKED = (LONG,), (16,)
"""Lengths that chunks are padded to: few, because each is a graph."""


def check(
    driver: PortableDriver,
    case: Case,
    slot: int,
    others: dict[int, Request],
    held: Sequence[int] = (),
) -> Request:
    """One case, beside others that decode whatever comes, from behind what the slot holds of it."""
    request = driver.request(case.token_ids)
    request.reuse(held)
    rows = [driver.prefill(slot, request)]
    while len(request.output_token_ids) < len(case.greedy["fp32"]):
        rows.append(driver.decode({slot: request, **others})[0])
    check_answer(case, request.output_token_ids, rows)
    return request


def neighbours(driver: PortableDriver, slots: Sequence[int]) -> dict[int, Request]:
    """Users who decode from random prompts."""
    random = np.random.default_rng(3)
    found = {}
    for slot in slots:
        request = driver.request(random.integers(0, driver.config.vocab_size, 9).tolist())
        driver.prefill(slot, request)
        found[slot] = request
    return found


@pytest.mark.parametrize(
    ("name", "lengths", "users_per_cell", "seq_length"),
    [
        pytest.param("chatglm3_6b", WHOLE, None, LONG, marks=pytest.mark.rare),
        pytest.param("chatglm3_6b", CHUNKED, 1, SHORT, marks=pytest.mark.rare),
        pytest.param("glm4", CHUNKED, None, LONG, marks=pytest.mark.rare),
        pytest.param("qwen2", WHOLE, 1, SHORT, marks=pytest.mark.rare),
        pytest.param("qwen2", CHUNKED, None, LONG, marks=pytest.mark.rare),
        pytest.param("qwen2_tied", CHUNKED, 3, LONG, marks=pytest.mark.rare),
        ("llama", (SHORT,), None, SHORT),
        pytest.param("glm4_0414", (SHORT,), None, SHORT, marks=pytest.mark.rare),
        pytest.param("llama_tied", WHOLE, 1, LONG, marks=pytest.mark.rare),
        pytest.param("qwen2_yarn", WHOLE, None, LONG, marks=pytest.mark.rare),
        pytest.param("qwen3", WHOLE, 3, LONG, marks=pytest.mark.rare),
        pytest.param("qwen3_tied", CHUNKED, 1, LONG, marks=pytest.mark.rare),
    ],
)
def test_logits_and_greedy_tokens(
    name: str, lengths: tuple[int, ...], users_per_cell: Optional[int], seq_length: int
) -> None:
    reference = read_reference(name)
    driver = PortableDriver(reference.folder, lengths, users_per_cell, seq_length)
    cases = reference.short + (reference.long if seq_length == LONG else [])
    for number, case in enumerate(cases):
        # A slot that was used before, and every other case alone.
        beside = neighbours(driver, (1, 3)) if number % 2 else {}
        check(driver, case, (0, 2)[number // 2 % 2], beside)
    held: Sequence[int] = ()
    for case in reference.short:
        # One user's slot: turns go on from each other, the last prompts share 64 tokens.
        if case.name.startswith(("chat", "shared_prefix")):
            request = check(driver, case, 1, {}, held)
            held = request.held_token_ids()
            assert request.cached_tokens >= 30 or case.name.endswith(("turn0", "user0"))


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("glm4_0414", "llama", "llama_tied", "qwen2_yarn", "qwen3_tied")
        ),
    ],
)
def test_several_at_once(name: str) -> None:
    """Half of all cases decode in the same steps, when their prompts have entered in chunks."""
    reference = read_reference(name)
    cases = reference.short + reference.long
    users = len(cases) // 2
    driver = PortableDriver(reference.folder, CHUNKED, seq_length=LONG, users=users)
    for first in range(2):
        wave = dict(enumerate(cases[first::2]))
        requests = {slot: driver.request(case.token_ids) for slot, case in wave.items()}
        rows = {slot: [driver.prefill(slot, one)] for slot, one in requests.items()}
        running = dict(requests)
        while running:
            for slot, logits in zip(list(running), driver.decode(running)):
                rows[slot].append(logits)
                if len(rows[slot]) == len(wave[slot].greedy["fp32"]):
                    del running[slot]
        for slot, case in wave.items():
            check_answer(case, requests[slot].output_token_ids, rows[slot])


@pytest.fixture(scope="module")
def qwen() -> PortableDriver:
    return PortableDriver(read_reference("qwen2").folder, (16, 128))


def test_every_position_of_a_prompt(qwen: PortableDriver) -> None:
    reference = read_reference("qwen2")
    cases = [case for case in reference.short if "prompt_all_logits" in case.arrays]
    assert [case.name for case in cases] == ["len1", "len5", "len17"]
    for case in cases:
        for last, expected in enumerate(case.arrays["prompt_all_logits"]):
            logits = qwen.prefill(1, qwen.request(case.token_ids[: last + 1]))
            assert worst(logits, expected) <= case.tolerance, (case.name, last)


def chunk_logits(
    driver: PortableDriver, token_ids: Sequence[int], start: int, end: int
) -> np.ndarray:
    """Of the last token of one chunk in slot 3, on the device thread."""
    results = driver.runner._run_chunk(3, token_ids[start:end], start, 128, 1)
    logits: np.ndarray = results.logits([0])[0]
    return logits


@settings(
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), length=st.integers(1, 90), seed=st.integers(0, 2**32))
def test_chunks_and_reuse_give_what_the_whole_prompt_gives(
    qwen: PortableDriver, data: st.DataObject, length: int, seed: int
) -> None:
    token_ids = np.random.default_rng(seed).integers(0, qwen.config.vocab_size, length).tolist()
    expected = qwen.prefill(0, qwen.request(token_ids))

    in_chunks = qwen.request(token_ids)
    while not in_chunks.prompt_is_in:
        rest = length - in_chunks.computed_tokens
        chunk = data.draw(st.integers(1, rest), label="chunk")
        start = in_chunks.computed_tokens
        logits = DEVICE_THREAD.call(partial(chunk_logits, qwen, token_ids, start, start + chunk))
        in_chunks.computed_tokens += chunk
    assert worst(logits, expected) <= 1e-4

    # What slot 3 holds now serves a prompt that begins alike and goes on otherwise.
    same = data.draw(st.integers(0, length - 1), label="same")
    changed = [*token_ids[:same], *((one + 1) % qwen.config.vocab_size for one in token_ids[same:])]
    reused = qwen.request(changed)
    reused.reuse(token_ids)
    assert reused.cached_tokens == same
    found = qwen.prefill(3, reused)
    assert worst(found, qwen.prefill(0, qwen.request(changed))) <= 1e-4


def test_half_precision_computes_the_same_within_its_range() -> None:
    """As a half-precision card would: weights, activations and caches of 11 bits."""
    reference = read_reference("chatglm3_6b")
    engine = EngineConfig(1, 16)
    config = read_model_config(reference.folder)

    def run() -> np.ndarray:
        device.configure("CPU", 0)
        model = make_model(config, PortableBackend.of("float16"))
        load_weights(reference.folder, config)(weights_of(model), lambda done, total, what: None)
        runner = ChunkedPrefillRunner(model, engine)
        logits: np.ndarray = runner._run_chunk(0, case.token_ids, 0, 16, 1).logits([0])[0]
        return logits

    case = next(case for case in reference.short if case.name == "len8")
    assert worst(DEVICE_THREAD.call(run), case.last_logits("fp32")) <= 0.05
