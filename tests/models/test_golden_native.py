"""With native kernels, too, logits and greedy tokens are those of the original code: every family,
prompts whole and in pieces, alone and beside others, with packed weights of every type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm_multiuser.checkpoint import read_model_config
from glm_multiuser.model_config import CausalConfig, ModelConfig
from glm_multiuser.progress import Progress
from glm_multiuser.weights import Weight, load_weights
from tests.checkpoint.folders import load_folder
from tests.models.golden_cases import CAUSAL, read_reference, worst
from tests.models.native_driver import NativeDriver

pytestmark = pytest.mark.slow

USERS = 4
SHORT, LONG = 256, 640
EVERY_CAUSAL = [
    # A tied head is another matrix, and nothing else.
    pytest.param(name, marks=pytest.mark.rare if name.endswith("_tied") else ())
    for name in CAUSAL
]


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("chatglm_6b_3layers", 16),
        ("chatglm_6b_3layers", LONG),
        pytest.param("chatglm_6b_28layers", 16, marks=pytest.mark.rare),
        ("chatglm3_6b", 16),
        ("glm4", LONG),
        ("glm4_0414", 16),
        pytest.param("glm4_0414", LONG, marks=pytest.mark.rare),
        ("llama", 16),
        pytest.param("llama", LONG, marks=pytest.mark.rare),
        ("llama_tied", LONG),
        ("qwen2", 16),
        ("qwen2_tied", LONG),
        ("qwen2_yarn", 16),
        pytest.param("qwen2_yarn", LONG, marks=pytest.mark.rare),
        pytest.param("qwen3", 16, marks=pytest.mark.rare),
        ("qwen3", LONG),
        ("qwen3_tied", 16),
    ],
)
def test_logits_and_greedy_tokens(name: str, chunk: int) -> None:
    reference = read_reference(name)
    driver = NativeDriver.of_folder(reference.folder, USERS, LONG, chunk=chunk)
    for number, case in enumerate(reference.short + reference.long):
        # A slot that was used before, and every other case alone.
        beside = driver.neighbours((1, 3)) if number % 2 else {}
        driver.check(case, (0, 2)[number // 2 % 2], beside)


@pytest.mark.parametrize("name", EVERY_CAUSAL)
def test_later_turns_start_behind_what_the_slot_holds(name: str) -> None:
    reference = read_reference(name)
    driver = NativeDriver.of_folder(reference.folder, USERS, SHORT)
    held: Sequence[int] = ()
    for case in reference.short:
        if case.name.startswith(("chat", "shared_prefix")):
            request = driver.check(case, 1, {}, held)
            held = request.held_token_ids()
            assert request.cached_tokens >= 30 or case.name.endswith(("turn0", "user0"))


@pytest.mark.parametrize("users_per_cell", [None, 1, 3])
def test_all_at_once(users_per_cell: Optional[int]) -> None:
    """Every case its own user, all in the same steps."""
    reference = read_reference("chatglm_6b_3layers")
    folder, cases = reference.folder, reference.short
    driver = NativeDriver.of_folder(folder, len(cases), SHORT, users_per_cell=users_per_cell)
    for case, (token_ids, logits) in zip(cases, driver.answer_together(cases)):
        assert token_ids == case.greedy["fp32"], case.name
        assert worst(logits, case.last_logits("fp32")) <= case.tolerance, case.name


def test_half_precision_rotary_tables() -> None:
    reference = read_reference("chatglm_6b_3layers")
    driver = NativeDriver.of_folder(reference.folder, USERS, SHORT, rotary="float16")
    for case in reference.short:
        driver.check(case, 0, numerics="rope16")


def test_depth_of_another_model() -> None:
    reference = read_reference("chatglm_6b_3layers")
    config = dataclasses.replace(ModelConfig.from_folder(reference.folder), deepnorm_layers=28)
    driver = NativeDriver(config, load_weights(reference.folder, config), USERS, SHORT)
    for case in reference.short:
        driver.check(case, 0, numerics="alpha28")


LINEAR = {"kind": "linear"}
NO_FACTOR = {"attention_factor": 1.0}


@pytest.mark.parametrize(
    ("name", "changes", "rope_scaling"),
    [
        ("glm4_0414", {"norm_position": "before"}, {}),
        ("glm4_0414", {"norm_position": "after"}, {}),
        ("glm4_0414", {"rotary_dim": 24}, {}),
        ("glm4_0414", {"rotary_interleaved": False}, {}),
        ("glm4_0414", {"qkv_bias": False}, {}),
        ("llama", {"rope_scaling": None}, {}),
        ("llama", {}, LINEAR),
        ("llama", {}, {"original_positions": 8192}),
        ("llama_tied", {"rope_theta": 500000.0}, {}),
        ("llama_tied", {"rotary_interleaved": True}, {}),
        ("qwen2_yarn", {"rope_scaling": None}, {}),
        ("qwen2_yarn", {}, LINEAR),
        ("qwen2_yarn", {}, NO_FACTOR),
        ("qwen3", {"query_key_norm": False}, {}),
        ("qwen3_tied", {"query_key_norm": False}, {}),
    ],
)
def test_every_answer_depends_on_what_is_special(
    name: str, changes: dict[str, Any], rope_scaling: dict[str, Any]
) -> None:
    """With the weights of the folder, but a model that lacks one of its features."""
    reference = read_reference(name)
    config = read_model_config(reference.folder)
    assert isinstance(config, CausalConfig)
    if rope_scaling:
        assert config.rope_scaling is not None
        changes = {"rope_scaling": dataclasses.replace(config.rope_scaling, **rope_scaling)}
    arrays = load_folder(reference.folder)

    def fill(weights: Mapping[str, Weight], progress: Progress) -> None:
        for parameter, weight in weights.items():
            weight.assign(arrays[parameter])

    other = dataclasses.replace(config, **changes)
    assert other != config
    cases = reference.short
    driver = NativeDriver(other, fill, len(cases), SHORT)
    for case, (token_ids, _) in zip(cases, driver.answer_together(cases)):
        assert token_ids != case.greedy["fp32"], case.name


@pytest.fixture(scope="module", params=EVERY_CAUSAL)
def causal(request: pytest.FixtureRequest) -> NativeDriver:
    reference = read_reference(request.param)
    return NativeDriver.of_folder(reference.folder, USERS, SHORT, chunk=SHORT)


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


@pytest.mark.parametrize(
    ("weight", "inputs", "cache", "most", "mean"),
    [
        pytest.param("bfloat16", "float32", "float32", 1.6, 0.5, marks=pytest.mark.rare),
        ("bfloat16", "bfloat16", "float32", 1.6, 0.5),
        ("bfloat16", "bfloat16", None, 2.4, 0.6),
        ("int8", "float32", "float32", 3.0, 1.1),
        pytest.param("int8", "float32", None, 3.0, 1.1, marks=pytest.mark.rare),
        ("int8", "int8", None, 3.0, 1.4),
        ("float32", "float32", "bfloat16", 0.6, 0.2),
        ("float32", "float32", "int8", 1.1, 0.5),
    ],
)
@pytest.mark.parametrize(
    "name", ["chatglm_6b_3layers", pytest.param("glm4", marks=pytest.mark.rare), "qwen2_tied"]
)
def test_smaller_weights_and_caches_stay_close(
    name: str, weight: str, inputs: str, cache: Optional[str], most: float, mean: float
) -> None:
    """How far logits may be from those of float32: in the worst case, and in the mean of the
    cases' worst. The reference models are random, which makes more of every rounding than a trained
    model does; their logits reach magnitudes of 9 to 16."""
    reference = read_reference(name)
    driver = NativeDriver.of_folder(
        reference.folder, USERS, SHORT, weight=weight, inputs=inputs, cache=cache
    )
    errors = []
    for case in reference.short:
        rows = driver.answer(0, driver.request(case.token_ids), 1)
        errors.append(worst(rows[0], case.last_logits("fp32")))
    assert 0 < max(errors) <= most, errors
    assert sum(errors) / len(errors) <= mean
