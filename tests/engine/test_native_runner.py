"""The native runner with a small random model: one graph, exact memory, and reused slots.

Its bits depend only on a request's own tokens, so answers are compared bitwise.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from glm_multiuser import MultiUserLLM, SamplingParams, memory
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.native.kv_layout import TILE
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.handle import Handle
from glm_multiuser.models.multi_user import MultiUserModel
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
    FLOAT32,
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


@pytest.fixture(scope="module")
def llm() -> Iterator[MultiUserLLM]:
    with open_llm(3) as llm:
        yield llm


@pytest.fixture(scope="module")
def causal() -> Iterator[MultiUserLLM]:
    """Of long prompts several pieces enter, some beside others'."""
    with open_llm(3, CAUSAL, prefill_chunk=5) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: MultiUserLLM) -> list[Any]:
    """The answers to PROMPTS of an undisturbed engine, one after the other."""
    return bits(one_by_one(llm))


# Graphs


@pytest.mark.parametrize("users", [1, 2, 33])
def test_one_graph_serves_any_number_of_users(users: int) -> None:
    reports: list[tuple[int, int, str]] = []
    with open_llm(users, progress=lambda *what: reports.append(what)) as llm:
        jobs = ["compile step graph", "check batch invariance"][: min(users, 2)]
        count = len(jobs)
        assert reports[-count - 1 :] == [
            *((number, count, what) for number, what in enumerate(jobs)),
            (count, count, "ready"),
        ]
        assert llm.stats().compiles == 1
        llm.generate([[1]] * users, SamplingParams(temperature=0.0, max_tokens=3))
        assert llm.stats().compiles_after_ready == 0
        assert llm.stats().batch_invariant


def test_nothing_compiles_while_requests_of_all_lengths_run(
    llm: MultiUserLLM, causal: MultiUserLLM
) -> None:
    lengths = list(range(1, SEQ_LENGTH))
    params = [
        GREEDY,
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, top_p=0.9, repetition_penalty=1.2, min_tokens=2),
    ]
    for one in (llm, causal):
        for number in (1, 2, len(lengths)):  # alone, some slots in use, all of them
            chosen = lengths[-number:]
            results = one.generate(
                [prompt(length, length) for length in chosen],
                [params[length % 3] for length in chosen],
            )
            assert {result.finish_reason for result in results} <= {"length", "stop"}
        stats = one.stats()
        assert stats.mean_batch > 1
        assert (stats.compiles, stats.compiles_after_ready) == (1, 0)


# Steps


def test_answers_together_are_those_alone_to_the_last_bit(
    llm: MultiUserLLM, expected: list[Any]
) -> None:
    prompts = [prompt(seed, 1 + seed * 5 % 16) for seed in range(9)]
    alone = bits(one_by_one(llm, prompts))
    assert bits(answers(llm, prompts)) == alone
    assert bits(answers(llm)) == expected


def test_where_a_prompt_is_cut_and_who_is_beside_it_changes_no_bit(causal: MultiUserLLM) -> None:
    prompts = [prompt(seed, 1 + seed * 5 % 16) for seed in range(9)]
    assert causal.stats().prefill_chunk == 5
    together = bits(answers(causal, prompts))
    assert together == bits(one_by_one(causal, prompts))
    with open_llm(1, CAUSAL, prefill_chunk=SEQ_LENGTH) as whole:
        assert whole.stats().prefill_chunk == SEQ_LENGTH
        assert bits(one_by_one(whole, prompts)) == together


def test_long_contexts_alone_and_among_others_to_the_last_bit() -> None:
    """Threads divide the positions of one user, and the users among many. One context grows past
    2,048 positions while it decodes."""
    prompts = [prompt(seed, length) for seed, length in enumerate((2040, 4200, 2100, 30))]
    model = replace(CAUSAL, max_sequence_length=4300)
    with open_llm(4, model, seq_length=4300) as llm:
        together = bits(answers(llm, prompts))
        assert bits(one_by_one(llm, prompts)) == together
    with open_llm(1, model, seq_length=4300, prefill_chunk=97) as llm:
        assert bits(one_by_one(llm, prompts)) == together


def test_a_step_takes_more_prompt_tokens_than_one_sequence_may_have() -> None:
    prompts = [prompt(seed, SEQ_LENGTH - 8) for seed in range(3)]
    with open_llm(3, CAUSAL, prefill_chunk=3 * SEQ_LENGTH) as llm:
        alone = bits(one_by_one(llm, prompts))

        def one_step() -> list[Handle]:
            handles = [llm.submit(each, params=GREEDY) for each in prompts]
            assert llm._engine.step()
            assert [slot.generated_tokens for slot in llm.slots()] == [1, 1, 1]
            return handles

        handles = DEVICE_THREAD.call(one_step)
        assert [Heard(each.result()).bits for each in handles] == alone


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(1, marks=pytest.mark.rare), 12, pytest.param(20, marks=pytest.mark.rare)],
)
def test_a_prompt_that_goes_through_some_layers_in_each_step_gets_the_same_bits(
    llm: MultiUserLLM, chunk: int
) -> None:
    # Answers end and begin while others are on their way, so rows move.
    prompts = [prompt(seed, 1 + seed * 7 % 16) for seed in range(9)]
    expected = bits(one_by_one(llm, prompts))
    with open_llm(3, prefill_chunk=chunk) as slow:
        assert bits(answers(slow, prompts)) == expected
        assert bits(one_by_one(slow, prompts)) == expected
        for steps in range(4):
            handles = moved(slow, prompts[:4], steps, 2 + steps % 3)
            assert [Heard(one.result()).bits for one in handles] == expected[:4]
        assert slow.stats().compiles_after_ready == 4, "one graph for each layout"

        def recover_in_between() -> Handle:
            handle = slow.submit(prompts[2], params=GREEDY)
            assert slow._engine.step()
            assert slow.slots()[0].state == ("prefill" if chunk < len(prompts[2]) else "decode")
            runner_of(slow).recover()
            return handle

        recovered: Handle = DEVICE_THREAD.call(recover_in_between)
        assert Heard(recovered.result()).bits == expected[2]


def test_a_prompt_behind_what_its_slot_still_holds_changes_no_bit(causal: MultiUserLLM) -> None:
    first = prompt(7, 9)
    handle = causal.submit(first, params=GREEDY, user="me")
    token_ids = [*first, *handle.result().token_ids][:14]
    again = causal.submit(token_ids, params=GREEDY, user="me").result()
    assert again.usage.cached_tokens == 13
    fresh = causal.submit(token_ids, params=replace(GREEDY, cache_prompt=False), user="me").result()
    assert fresh.usage.cached_tokens == 0
    assert Heard(again).bits == Heard(fresh).bits


# Memory


@pytest.mark.parametrize("users", [1, 3])
def test_bytes_per_user_are_those_of_the_caches(users: int) -> None:
    with open_llm(users, seq_length=2 * TILE) as llm:
        assert_bytes_per_user(llm, 2 * TILE, 2 * TILE)


def test_keys_of_a_sequence_that_is_no_whole_number_of_tiles_are_filled_up(
    llm: MultiUserLLM,
) -> None:
    assert TILE < SEQ_LENGTH < 2 * TILE
    assert_bytes_per_user(llm, 2 * TILE, SEQ_LENGTH)


def assert_bytes_per_user(llm: MultiUserLLM, keys: int, values: int) -> None:
    """That each user has so many positions of keys and of values, and nothing else says more."""
    stats, engine = llm.stats(), runner_of(llm).engine
    heads = MODEL.num_layers * MODEL.num_attention_heads
    sizes = [positions * MODEL.head_dim * FLOAT32 for positions in (keys, values)]
    assert (
        stats.cache_bytes_per_user
        == heads * sum(map(in_pages, sizes))
        == memory.user_bytes(MODEL, engine)
    )
    assert (
        cache_bytes(llm) == stats.cache_reserved_bytes == stats.users * stats.cache_bytes_per_user
    )


def test_a_closed_engine_that_nobody_holds_is_gone() -> None:
    llm = open_llm(2)
    answers(llm)
    model = weakref.ref(runner_of(llm).model)
    stats = llm.stats()
    llm.close()
    assert llm.stats() == stats
    del llm
    gc.collect()
    assert model() is None


# Slots handed on


def test_a_slot_that_held_nan_is_handed_on(llm: MultiUserLLM, expected: list[Any]) -> None:
    model = runner_of(llm).model
    poison_all(model)
    assert bits(answers(llm)) == expected
    poison_all(model)
    assert bits(one_by_one(llm)) == expected
    assert llm.stats().compiles_after_ready == 0


def test_nan_of_one_user_is_noticed_by_nobody_else(llm: MultiUserLLM, expected: list[Any]) -> None:
    first, failing, third = poisoned(llm, 1)
    results = [first.result(), third.result()]
    assert [Heard(one).bits for one in results] == [expected[0], expected[2]]
    failed = failing.result()
    assert failed.finish_reason == "error"
    assert "not finite" in str(failed.error)
    # The next user of that slot, and the same user again.
    later = [llm.submit(PROMPTS[1], params=GREEDY, user=user) for user in (1, "next", "one more")]
    assert [Heard(one.result()).bits for one in later] == [expected[1]] * 3


def test_a_step_that_the_device_broke_off_leaves_no_trace(
    llm: MultiUserLLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llm)
    working = runner._forward

    def write_and_break(*args: Any) -> None:
        working(*args)[0].asnumpy()
        raise RuntimeError("the device broke")

    write_and_break.compile_cache = working.compile_cache  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", write_and_break)
        broken = llm.generate([prompt(4, 27)], GREEDY)
    assert broken[0].finish_reason == "error"
    assert bits(one_by_one(llm)) == expected


def test_a_step_that_the_kernels_refuse_ends_its_own_requests_alone(
    llm: MultiUserLLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_vocab_size", MODEL.vocab_size + 1)
        failed = llm.submit([1, MODEL.vocab_size], params=GREEDY).result()
    assert failed.finish_reason == "error"
    assert bits(one_by_one(llm)) == expected


# Resizing


@pytest.mark.parametrize(("steps", "users"), [(0, 1), (1, 5), (2, 2), (4, 3), (8, 4)])
def test_what_runs_goes_on_after_a_resize(
    llm: MultiUserLLM, expected: list[Any], steps: int, users: int
) -> None:
    before = llm.stats().compiles
    handles = moved(llm, PROMPTS, steps, users)
    assert [Heard(handle.result()).bits for handle in handles] == expected
    assert llm.stats().compiles == before + 1, "one graph for the new layout"


@pytest.mark.parametrize("steps", range(6))
def test_a_prompt_that_is_not_in_goes_on_after_a_resize(causal: MultiUserLLM, steps: int) -> None:
    prompts = [prompt(8, 13), prompt(9, 11), prompt(10, 2)]
    expected = bits(one_by_one(causal, prompts))
    entered = causal.stats().prompt_tokens
    handles = moved(causal, prompts, steps, 2 + steps % 2)
    assert [Heard(handle.result()).bits for handle in handles] == expected
    assert causal.stats().prompt_tokens == entered + 26, "what was in was not lost"


def test_a_resize_counts_no_compilation_after_ready(llm: MultiUserLLM) -> None:
    llm.resize(2)
    answers(llm)
    stats = llm.stats()
    assert (stats.users, stats.compiles_after_ready) == (2, 0)
    slots = {one.name for one in runner_of(llm).model.get_parameters() if "key_past" in one.name}
    assert len(slots) == MODEL.num_layers  # one cell for all users


def test_a_resize_that_the_device_refuses_goes_back(
    llm: MultiUserLLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = llm.stats().users
    model = runner_of(llm).model
    lay_out = model.set_layout

    def refuse(self: MultiUserModel, layout: CellLayout) -> None:
        if layout.users == 9:
            raise MemoryError("9 are too many")
        lay_out(layout)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "set_layout", refuse)
        with pytest.raises(MemoryError, match="9 are too many"):
            llm.resize(9)
    assert bits(answers(llm)) == expected
    assert llm.stats().users == users
    assert llm.stats().compiles_after_ready == 0
