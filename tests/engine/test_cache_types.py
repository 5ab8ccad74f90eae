"""Smaller cache types keep float32's guarantee: bits depend only on a request's own tokens, however
a prompt is chunked, whatever else is in the batch or was in its slot before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glm_multiuser import MultiUserLLM, memory
from glm_multiuser.backends.native.kv_layout import TILE
from tests.engine.native_llm import (
    bits,
    in_pages,
    moved,
    open_llm,
    poison_all,
    poisoned,
    runner_of,
)
from tests.engine.small_model import (
    CAUSAL,
    GREEDY,
    MODEL,
    PROMPTS,
    SEQ_LENGTH,
    Heard,
    answers,
    cache_bytes,
    one_by_one,
    prompt,
)

TYPES = ("bfloat16", "int8")
LONGER = [prompt(8, 13), prompt(9, 11), prompt(10, 2)]


@pytest.fixture(scope="module", params=TYPES)
def causal(request: pytest.FixtureRequest) -> Iterator[MultiUserLLM]:
    with open_llm(3, CAUSAL, prefill_chunk=5, cache_dtype=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(causal: MultiUserLLM) -> list[Any]:
    """The answers to PROMPTS of an engine that was never disturbed, one after the other."""
    return bits(one_by_one(causal))


def cache_dtype(llm: MultiUserLLM) -> str:
    return llm.stats().cache_dtype


def test_the_type_is_a_setting_and_changes_the_bits(
    causal: MultiUserLLM, expected: list[Any]
) -> None:
    assert runner_of(causal).engine.cache_dtype == cache_dtype(causal)
    with open_llm(3, CAUSAL, prefill_chunk=5) as full:
        assert cache_dtype(full) == "float32"
        heard = one_by_one(full)
    assert bits(heard) != expected
    # The model is random, and yet its most likely first token hardly becomes another one.
    first = [one.logprobs[0] for one in heard]
    np.testing.assert_allclose([logprobs[0] for _, logprobs in expected], first, atol=0.02)


def test_bytes_per_user(causal: MultiUserLLM) -> None:
    keys = TILE * -(-SEQ_LENGTH // TILE)
    per_head = {"bfloat16": 2 * CAUSAL.head_dim, "int8": CAUSAL.head_dim + 4}
    heads = CAUSAL.num_layers * CAUSAL.num_key_value_heads
    stats = causal.stats()
    sizes = [positions * per_head[stats.cache_dtype] for positions in (keys, SEQ_LENGTH)]
    assert (
        stats.cache_bytes_per_user
        == heads * sum(map(in_pages, sizes))
        == memory.user_bytes(CAUSAL, runner_of(causal).engine)
    )
    assert cache_bytes(causal) >= stats.cache_reserved_bytes
    assert stats.cache_reserved_bytes == stats.users * stats.cache_bytes_per_user


def test_together_and_in_chunks_are_alone_and_whole(causal: MultiUserLLM) -> None:
    prompts = [prompt(seed, 1 + seed * 5 % 16) for seed in range(9)]
    together = bits(answers(causal, prompts))
    assert together == bits(one_by_one(causal, prompts))
    settings = {"prefill_chunk": SEQ_LENGTH, "cache_dtype": cache_dtype(causal)}
    with open_llm(1, CAUSAL, **settings) as whole:
        assert bits(one_by_one(whole, prompts)) == together
    with open_llm(5, CAUSAL, users_per_cell=2, **settings) as cells:
        assert bits(answers(cells, prompts)) == together


def test_a_prompt_behind_what_its_slot_still_holds_changes_no_bit(causal: MultiUserLLM) -> None:
    first = prompt(7, 9)
    handle = causal.submit(first, params=GREEDY, user="me")
    token_ids = [*first, *handle.result().token_ids][:14]
    again = causal.submit(token_ids, params=GREEDY, user="me").result()
    assert again.usage.cached_tokens == 13
    fresh = causal.submit(token_ids, params=replace(GREEDY, cache_prompt=False), user="me").result()
    assert Heard(again).bits == Heard(fresh).bits


def test_slots_that_held_nan_are_handed_on(causal: MultiUserLLM, expected: list[Any]) -> None:
    model = runner_of(causal).model
    poison_all(model)
    assert bits(answers(causal)) == expected
    poison_all(model)
    assert bits(one_by_one(causal)) == expected
    assert causal.stats().compiles_after_ready == 0


def test_nan_of_one_user_is_noticed_by_nobody_else(
    causal: MultiUserLLM, expected: list[Any]
) -> None:
    failing, *others = poisoned(causal, 0)
    assert [Heard(one.result()).bits for one in others] == expected[1:]
    failed = failing.result()
    assert failed.finish_reason == "error"
    assert "not finite" in str(failed.error)
    again = causal.submit(PROMPTS[0], params=GREEDY, user=0)
    assert Heard(again.result()).bits == expected[0]


@pytest.mark.parametrize("steps", [1, 4])
def test_what_runs_goes_on_after_a_resize(causal: MultiUserLLM, steps: int) -> None:
    answered = bits(one_by_one(causal, LONGER))
    before = causal.stats()
    handles = moved(causal, LONGER, steps, 2 + steps % 2)
    assert [Heard(handle.result()).bits for handle in handles] == answered
    after = causal.stats()
    assert after.prompt_tokens == before.prompt_tokens + 26, "what was in was not lost"
    assert after.cache_dtype == before.cache_dtype


def test_long_prompts_of_chatglm_6b_go_through_some_layers_in_each_step() -> None:
    prompts = [prompt(seed, 1 + seed * 7 % 16) for seed in range(5)]
    with open_llm(3, cache_dtype="int8") as llm:
        expected = bits(one_by_one(llm, prompts))
    with open_llm(3, cache_dtype="int8", prefill_chunk=12) as slow:
        assert bits(answers(slow, prompts)) == expected
        handles = moved(slow, prompts[:4], 3, 2)
        assert [Heard(one.result()).bits for one in handles] == expected[:4]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "float32"),
        ({"weight_dtype": "bfloat16"}, "float32"),
        ({"compute_dtype": "bfloat16"}, "bfloat16"),
        ({"weight_dtype": "int8"}, "bfloat16"),
        ({"weight_dtype": "int8", "cache_dtype": "float32"}, "float32"),
    ],
)
def test_the_type_that_inputs_are_rounded_to_is_the_default(
    settings: dict[str, Any], expected: str
) -> None:
    stored = {"float32": np.float32, "bfloat16": np.int16}
    with open_llm(1, **settings) as llm:
        assert cache_dtype(llm) == expected
        model = runner_of(llm).model
        arrays = [one.array for cell, _ in model.caches_of(0) for one in (cell.keys, cell.values)]
        assert {one.dtype for one in arrays} == {np.dtype(stored[expected])}
        assert llm.stats().cache_bytes_per_user == memory.user_bytes(MODEL, runner_of(llm).engine)
