"""With native kernels, too, logits and greedy tokens are those of the original code: every family,
prompts whole and in pieces, alone and beside others, with packed weights of every type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.golden_cases import read_reference, worst
from tests.models.native_driver import NativeDriver, driver_of

USERS = 4
SHORT, LONG = 256, 640
TOLERANCES = {
    "chatglm_6b_3layers": 5e-4,
    "chatglm_6b_28layers": 1e-4,
    "chatglm3_6b": 2e-4,
    "glm4": 2e-4,
    "qwen2": 3e-4,
    "qwen2_tied": 3e-4,
}
CAUSAL = ("chatglm3_6b", "glm4", "qwen2", "qwen2_tied")


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("chatglm_6b_3layers", 16),
        ("chatglm_6b_3layers", LONG),
        ("chatglm_6b_28layers", 16),
        ("chatglm3_6b", 16),
        ("glm4", LONG),
        ("qwen2", 16),
        ("qwen2_tied", LONG),
    ],
)
def test_logits_and_greedy_tokens(name: str, chunk: int) -> None:
    reference = read_reference(name, TOLERANCES[name])
    driver = driver_of(reference, USERS, LONG, chunk=chunk)
    for number, case in enumerate(reference.short + reference.long):
        # A slot that somebody used before, and every other case alone.
        beside = driver.neighbours((1, 3)) if number % 2 else {}
        driver.check(case, (0, 2)[number // 2 % 2], beside)


@pytest.mark.parametrize("name", CAUSAL)
def test_later_turns_start_behind_what_the_slot_holds(name: str) -> None:
    reference = read_reference(name, TOLERANCES[name])
    driver = driver_of(reference, USERS, SHORT)
    held: Sequence[int] = ()
    for case in reference.short:
        if case.name.startswith(("chat", "shared_prefix")):
            request = driver.check(case, 1, {}, held)
            held = request.held_token_ids()
            assert request.cached_tokens >= 30 or case.name.endswith(("turn0", "user0"))


@pytest.mark.parametrize("users_per_cell", [None, 1, 3])
def test_all_at_once(users_per_cell: Optional[int]) -> None:
    """Every case its own user, all in the same steps."""
    reference = read_reference("chatglm_6b_3layers", TOLERANCES["chatglm_6b_3layers"])
    driver = driver_of(reference, len(reference.short), SHORT, users_per_cell=users_per_cell)
    requests = dict(enumerate(driver.request(case.token_ids) for case in reference.short))
    last: dict[int, np.ndarray] = {}
    length = max(len(case.greedy["fp32"]) for case in reference.short)
    while min(len(request.output_token_ids) for request in requests.values()) < length:
        for slot, logits in driver.step(requests).items():
            last.setdefault(slot, logits)
    for slot, case in enumerate(reference.short):
        greedy = case.greedy["fp32"]
        assert requests[slot].output_token_ids[: len(greedy)] == greedy, case.name
        assert worst(last[slot], case.last_logits("fp32")) <= case.tolerance, case.name


def test_half_precision_rotary_tables() -> None:
    reference = read_reference("chatglm_6b_3layers", TOLERANCES["chatglm_6b_3layers"])
    driver = driver_of(reference, USERS, SHORT, rotary="float16")
    for case in reference.short:
        driver.check(case, 0, numerics="rope16")


def test_depth_of_another_model() -> None:
    reference = read_reference("chatglm_6b_3layers", TOLERANCES["chatglm_6b_3layers"])
    driver = driver_of(reference, USERS, SHORT, deepnorm_layers=28)
    for case in reference.short:
        driver.check(case, 0, numerics="alpha28")


@pytest.fixture(scope="module", params=CAUSAL)
def causal(request: pytest.FixtureRequest) -> NativeDriver:
    reference = read_reference(request.param, TOLERANCES[request.param])
    return driver_of(reference, USERS, SHORT, chunk=SHORT)


@settings(
    derandomize=True,
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), length=st.integers(1, 90), seed=st.integers(0, 2**32))
def test_pieces_and_reuse_give_the_bits_of_the_whole_prompt(
    causal: NativeDriver, data: st.DataObject, length: int, seed: int
) -> None:
    token_ids = np.random.default_rng(seed).integers(0, causal.config.vocab_size, length).tolist()
    whole = causal.request(token_ids)
    expected = causal.answer(0, whole, 4)

    beside = {1: causal.request([5, 6, 7]), 2: causal.request([8])}
    causal.step(beside)
    in_pieces = causal.request(token_ids)
    rows: list[np.ndarray] = []
    while len(in_pieces.output_token_ids) < 4:
        most = data.draw(st.integers(1, length), label="most")
        rows += [
            logits
            for slot, logits in causal.step({3: in_pieces, **beside}, most).items()
            if slot == 3
        ]
    np.testing.assert_array_equal(np.stack(rows), expected)

    # What slot 3 holds now serves a prompt that begins alike and goes on otherwise.
    same = data.draw(st.integers(0, length - 1), label="same")
    changed = [
        *token_ids[:same],
        *((one + 1) % causal.config.vocab_size for one in token_ids[same:]),
    ]
    reused = causal.request(changed)
    reused.reuse(token_ids)
    assert reused.cached_tokens == same
    found = causal.answer(3, reused, 3)
    np.testing.assert_array_equal(found, causal.answer(0, causal.request(changed), 3))


DISTANCES = {"bfloat16": (1.6, 0.5), "int8": (3.0, 1.1)}
"""How far logits may be from those of float32 weights: in the worst case, and in the mean of the
cases' worst. The reference models are random, which makes more of every rounding than a trained
model does; their logits reach magnitudes of 9 to 16."""


@pytest.mark.parametrize("weight", DISTANCES)
@pytest.mark.parametrize("name", ["chatglm_6b_3layers", "glm4", "qwen2_tied"])
def test_smaller_weights_stay_close(name: str, weight: str) -> None:
    reference = read_reference(name, TOLERANCES[name])
    driver = driver_of(reference, USERS, SHORT, weight=weight)
    errors = []
    for case in reference.short:
        rows = driver.answer(0, driver.request(case.token_ids), 1)
        errors.append(worst(rows[0], case.last_logits("fp32")))
    most, mean = DISTANCES[weight]
    assert 0 < max(errors) <= most, errors
    assert sum(errors) / len(errors) <= mean
