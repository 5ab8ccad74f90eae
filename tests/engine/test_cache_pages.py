"""Caches use memory only for their tokens; freed memory is never read."""

from __future__ import annotations

import logging
import mmap
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm_multiuser import ConfigError, GenerationResult, MultiUserLLM, PromptTooLongError
from glm_multiuser.backends.native import library, pages
from glm_multiuser.backends.native.cells import KVCache
from glm_multiuser.backends.native.kv_layout import held_bytes
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine.native import NativeRunner
from glm_multiuser.memory import user_bytes
from tests.engine.native_llm import (
    huge_bytes,
    open_llm,
    resident_bytes,
    resident_pages,
    runner_of,
)
from tests.engine.small_model import CAUSAL, GREEDY, MODEL, Heard, prompt
from tests.poison import poison

REASON = library.unavailable_reason("CPU") or pages.UNAVAILABLE
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

LENGTH = 512
LONG = replace(CAUSAL, max_sequence_length=LENGTH)
"""64 bytes for each head of a position: 64 positions in a page."""
USERS = 4
HUGE = 1 << 21
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HAS_HUGE = ENABLED.exists() and "[never]" not in ENABLED.read_text()


def of_tokens(*tokens: int) -> int:
    """Expected memory of users with these token counts."""
    layers_and_heads = LONG.num_layers * LONG.num_key_value_heads
    return 2 * layers_and_heads * sum(-(-one * 64 // pages.SIZE) for one in tokens) * pages.SIZE


@pytest.fixture(scope="module")
def llm() -> Iterator[MultiUserLLM]:
    with open_llm(USERS, LONG, seq_length=LENGTH) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> None:
    """Every test starts with empty slots."""
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        for handle in [llm.submit([1], params=GREEDY) for _ in range(USERS)]:
            handle.result()
        llm.resize(USERS)


def ask(llm: MultiUserLLM, token_ids: list[int], user: Any = None, new: int = 4) -> Any:
    params = replace(GREEDY, max_tokens=new)
    result: GenerationResult = llm.submit(token_ids, user=user, params=params).result()
    assert result.finish_reason == "length"
    return result


def check_resident(llm: MultiUserLLM, *tokens: int) -> None:
    """That users hold so many tokens, and caches have the pages for them and no others."""
    claimed = DEVICE_THREAD.call(lambda: llm.stats().cache_resident_bytes)
    assert claimed == of_tokens(*tokens)
    assert resident_bytes(llm) == claimed


def test_caches_that_hold_nothing_take_nothing(llm: MultiUserLLM) -> None:
    check_resident(llm)
    stats, engine = llm.stats(), runner_of(llm).engine
    assert stats.cache_reserved_bytes == USERS * of_tokens(LENGTH)
    assert user_bytes(LONG, engine) == of_tokens(LENGTH)
    assert user_bytes(LONG, engine, tokens=65) == of_tokens(65)


def test_memory_follows_the_tokens(llm: MultiUserLLM) -> None:
    first = prompt(1, 200)
    answer = ask(llm, first, user=1)
    check_resident(llm, 203)
    ask(llm, prompt(2, 60), user=2)
    check_resident(llm, 203, 63)
    ask(llm, prompt(3, 300))  # names no user
    check_resident(llm, 203, 63)
    longer = [*first, *answer.token_ids, *prompt(4, 100)]
    assert ask(llm, longer, user=1).usage.cached_tokens == 203
    check_resident(llm, 307, 63)
    assert ask(llm, first[:100], user=1).usage.cached_tokens == 99
    check_resident(llm, 103, 63)
    for user in (3, 4, 5):  # the last one takes the slot of user 2
        ask(llm, prompt(user, 10), user=user)
    check_resident(llm, 103, 13, 13, 13)
    llm.resize(USERS - 1)
    check_resident(llm)
    llm.resize(USERS)


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens a slot kept memory for, each time that the rest of it was given back."""
    calls, trim = [], NativeRunner.trim

    def counted(runner: NativeRunner, slot: int, tokens: int) -> None:
        calls.append(tokens)
        trim(runner, slot, tokens)

    monkeypatch.setattr(NativeRunner, "trim", counted)
    return calls


def test_a_prompt_takes_over_the_memory_of_the_one_before(
    llm: MultiUserLLM, given_back: list[int]
) -> None:
    ask(llm, prompt(1, 200), user=1)
    assert ask(llm, prompt(2, 300), user=1).usage.cached_tokens == 0
    assert given_back == []
    check_resident(llm, 303)
    assert ask(llm, prompt(3, 150), user=1).usage.cached_tokens == 0
    assert given_back == [150]
    check_resident(llm, 153)


def test_a_prompt_that_is_cancelled_gives_back_what_it_did_not_reach(
    llm: MultiUserLLM, given_back: list[int]
) -> None:
    ask(llm, prompt(1, 450), user=1)
    chunk = llm.stats().prefill_chunk

    def cancel_after_a_chunk() -> Any:
        handle = llm.submit(prompt(2, 400), user=1, params=GREEDY)
        llm._engine.step()
        assert llm._engine.slots()[0].state == "prefill"
        check_resident(llm, 400)
        handle.cancel()
        llm._engine.step()
        return handle

    assert DEVICE_THREAD.call(cancel_after_a_chunk).result().finish_reason == "cancelled"
    assert given_back == [400, chunk]
    check_resident(llm, chunk)


def test_a_request_that_fails_leaves_nothing(
    llm: MultiUserLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(NativeRunner, "_run_tokens", fail)
        assert llm.submit(prompt(1, 70), user=1, params=GREEDY).result().finish_reason == "error"
    check_resident(llm)


def conversations(llm: MultiUserLLM) -> list[Any]:
    """Turns of six users on four slots: longer ones, shorter ones, and others' in between."""
    chosen, heard = random.Random(3), []
    for turn in range(18):
        user = chosen.randrange(6)
        words = prompt(user, chosen.choice([9, 70, 150]))
        handles = [
            llm.submit(words, user=user, params=GREEDY),
            llm.submit(prompt(50 + turn, 30), params=GREEDY),
        ]
        heard += [Heard(one.result()).bits for one in handles]
    return heard


@pytest.fixture(scope="module")
def kept() -> list[Any]:
    """What they hear where no memory is ever given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeRunner, "trim", lambda *arguments: None)
        with open_llm(USERS, LONG, seq_length=LENGTH) as llm:
            heard = conversations(llm)
            assert resident_bytes(llm) > llm.stats().cache_resident_bytes
            return heard


def test_the_same_bits_as_where_nothing_is_given_back(llm: MultiUserLLM, kept: list[Any]) -> None:
    assert conversations(llm) == kept


def test_what_was_given_back_is_never_read(
    llm: MultiUserLLM, kept: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros would go unnoticed, so there is NaN in their place."""
    spoiled = []

    def spoil(runner: NativeRunner, slot: int, tokens: int) -> None:
        spoiled.append(tokens)
        held = list(runner.read_slot(slot, tokens))
        poison(runner.model, slot)
        for _ in runner.write_slot(slot, tokens, held):
            pass

    monkeypatch.setattr(NativeRunner, "trim", spoil)
    assert conversations(llm) == kept
    assert 0 in spoiled
    assert max(spoiled) > 0


def test_a_long_context_for_every_user_costs_nothing() -> None:
    long = replace(LONG, max_sequence_length=1 << 15)
    with open_llm(256, long, seq_length=1 << 15) as llm:
        assert llm.stats().cache_reserved_bytes == 256 * 2**24
        assert len(ask(llm, prompt(1, 40), user=1).token_ids) == 4
        assert resident_bytes(llm) == llm.stats().cache_resident_bytes == of_tokens(43)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_other_types_of_caches(cache_dtype: str) -> None:
    with open_llm(2, LONG, seq_length=500, cache_dtype=cache_dtype, users_per_cell=1) as llm:
        ask(llm, prompt(1, 400), user=1)
        assert resident_bytes(llm) == llm.stats().cache_resident_bytes
        ask(llm, prompt(1, 100), user=1)
        assert resident_bytes(llm) == llm.stats().cache_resident_bytes
        assert llm.stats().cache_resident_bytes == user_bytes(LONG, runner_of(llm).engine, 103)


def test_a_bidirectional_model_keeps_nothing_for_idle_users() -> None:
    with open_llm(2, replace(MODEL, max_sequence_length=LENGTH), seq_length=LENGTH) as llm:
        handle = llm.submit(prompt(1, 100), user=1, params=GREEDY)
        next(iter(handle))
        assert handle.result().finish_reason == "length"
        assert resident_bytes(llm) == llm.stats().cache_resident_bytes == 0


# Preallocated


def test_preallocated_caches_keep_their_memory(kept: list[Any]) -> None:
    texts: list[str] = []

    def progress(done: int, total: int, text: str) -> None:
        texts.append(text)

    settings: dict[str, Any] = {"seq_length": LENGTH, "preallocate_caches": True}
    with open_llm(USERS, LONG, progress=progress, **settings) as llm:
        assert texts.count("allocate caches") == LONG.num_layers
        check_resident(llm, *[LENGTH] * USERS)
        assert llm.stats().cache_reserved_bytes == USERS * of_tokens(LENGTH)
        assert conversations(llm) == kept
        check_resident(llm, *[LENGTH] * USERS)
        llm.resize(2)
        check_resident(llm, LENGTH, LENGTH)
        assert user_bytes(LONG, runner_of(llm).engine, tokens=1) == of_tokens(LENGTH)


# A budget


def test_a_real_engine_within_its_budget() -> None:
    limit = of_tokens(300)
    chosen = random.Random(1)
    prompts = [prompt(number, chosen.choice([5, 40, 90, 200])) for number in range(100)]
    with open_llm(8, LONG, seq_length=LENGTH) as free:
        expected = [Heard(one).bits for one in free.generate(prompts, GREEDY)]
    settings: dict[str, Any] = {"seq_length": LENGTH, "max_queue": 100}
    with open_llm(8, LONG, cache_memory=limit, **settings) as llm:
        taken: list[tuple[int, int]] = []
        llm.on_step(
            lambda report: taken.append(
                (llm.stats().cache_resident_bytes, llm._engine._scheduler.slots.taken_bytes)
            )
        )
        handles = [
            llm.submit(one, user=number % 30, params=GREEDY) for number, one in enumerate(prompts)
        ]
        llm.resize(3)
        llm.resize(8)
        assert [Heard(one.result()).bits for one in handles] == expected
        assert all(resident <= promised <= limit for resident, promised in taken)
        assert resident_bytes(llm) <= limit


def test_a_prompt_that_the_budget_cannot_hold_is_rejected() -> None:
    with open_llm(2, LONG, seq_length=LENGTH, cache_memory=of_tokens(64)) as llm:
        assert llm.max_length == 64
        text = "prompt has 64 tokens; with cache_memory 32768 it may have at most 63"
        with pytest.raises(PromptTooLongError, match=text):
            llm.submit(prompt(1, 64))
        assert len(ask(llm, prompt(1, 60), new=100).token_ids) == 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"cache_memory": "8 potatoes"},
            "cache_memory is '8 potatoes'; it must be a number of bytes",
        ),
        ({"cache_memory": True}, "cache_memory is True"),
        ({"cache_memory": 0}, "cache_memory is 0; it must be from 1 byte"),
        ({"cache_memory": "16KiB"}, "cache_memory is '16KiB'; it must be at least 32768 bytes"),
        (
            {"cache_memory": "1GiB", "preallocate_caches": True},
            "cache_memory is '1GiB', and preallocate_caches is True; such caches take their whole "
            "size from the start",
        ),
        (
            {"cache_memory": "1GiB", "kernels": "portable"},
            "cache_memory '1GiB' needs native kernels, but kernels is 'portable'",
        ),
    ],
)
def test_budgets_that_cannot_work(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_llm(2, LONG, **{"seq_length": LENGTH, **settings})


# Pages


def test_parts_lose_their_ends_and_nobody_elses() -> None:
    paged = pages.PagedArray((3, 2, 4, pages.SIZE // 4), np.float32)
    assert resident_pages(paged.array) == 0
    paged.array[...] = 7.0
    paged.trim(1, pages.SIZE + 1)
    assert (paged.array[1, :, :2] == 7.0).all()
    assert resident_pages(paged.array) == 3 * 8 - 2 * 2
    paged.trim(1, 4 * pages.SIZE)
    assert resident_pages(paged.array) == 20
    assert (paged.array[1, :, 2:] == 0.0).all()
    assert (paged.array[[0, 2]] == 7.0).all()
    paged.trim(0, 0)
    paged.give_back()
    assert resident_pages(paged.array) == 0


def test_preallocated_pages_stay_until_all_are_returned() -> None:
    paged = pages.PagedArray((2, 1, 4 * HUGE), np.int8, preallocated=True)
    paged.allocate()
    assert resident_pages(paged.array) * pages.SIZE == paged.array.nbytes
    assert huge_bytes(paged.array) > 0 or not HAS_HUGE
    paged.array[0] = 7
    paged.trim(0, 0)
    assert (paged.array[0] == 7).all()
    assert resident_pages(paged.array) * pages.SIZE == paged.array.nbytes
    paged.give_back()
    assert resident_pages(paged.array) == 0


def test_a_system_that_refuses_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked(mmap.mmap):
        def madvise(self, *arguments: Any) -> None:
            raise OSError(22, "locked")

    pages.warn_once.cache_clear()
    paged = pages.PagedArray((2, 1, pages.SIZE), np.int8)
    paged._map = Locked(-1, pages.SIZE)
    with caplog.at_level(logging.WARNING):
        paged.trim(0, 0)
        paged.trim(1, 0)
    assert [record.message for record in caplog.records] == [
        "memory of KV caches stays in use, because the system refuses it: [Errno 22] locked"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("preallocated", [False, True])
def test_what_is_saved_of_a_user_has_nothing_of_the_one_before(
    dtype: str, preallocated: bool
) -> None:
    """Not even where the last tile of keys ends after the user's last position."""
    settings: dict[str, Any] = {"cache_dtype": dtype, "preallocate_caches": preallocated}
    with open_llm(1, LONG, seq_length=LENGTH, **settings) as llm:

        def saved() -> list[bytes]:
            ask(llm, prompt(1, 10), user="bob")
            return DEVICE_THREAD.call(
                lambda: [piece.tobytes() for piece in runner_of(llm).read_slot(0, 13)]
            )

        alone = saved()
        ask(llm, prompt(2, 200), user="alice")
        assert saved() == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("positions", [1, 16, 1100, 2050])
def test_preallocated_caches_take_what_is_said(dtype: str, positions: int) -> None:
    """Heads of int8 caches would take up to 1,023 positions more to end at a page boundary."""
    cache = KVCache(dtype, 3, LONG.num_key_value_heads, positions, LONG.head_dim, True)
    taken = cache.keys.array.nbytes + cache.values.array.nbytes
    said = 3 * held_bytes(LONG, dtype, 0, positions, True) // LONG.num_layers
    heads = 3 * LONG.num_key_value_heads
    assert said - 2 * heads * pages.SIZE < taken <= said
