"""The portable runner with a small random model: graphs, memory, and clean slots.

A graph takes a second to compile, whatever its size, so sequences and cache blocks are short here,
and tests share engines.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import numpy as np
import pytest
from mindspore import Tensor

from glm_multiuser import EngineConfig, ModelConfig, MultiUserLLM, SamplingParams, device, memory
from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.build import make_model, make_runner
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine import portable
from glm_multiuser.engine.graph_shapes import (
    batch_sizes,
    block_counts,
    graph_counts,
    prompt_counts,
    prompt_lengths,
)
from glm_multiuser.engine.portable import WholePrefillRunner
from glm_multiuser.model_config import AnyModelConfig
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

BLOCKS = (20, 8)


def open_llm(users: int, model: ModelConfig = MODEL, **settings: Any) -> MultiUserLLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "BLOCK_LENGTH", BLOCKS[0])
        return MultiUserLLM.from_config(
            model,
            seed=1,
            **{"users": users, "seq_length": SEQ_LENGTH, "kernels": "portable", **settings},
        )


def resize(llm: MultiUserLLM, users: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "BLOCK_LENGTH", BLOCKS[0])
        llm.resize(users)


@pytest.fixture(scope="module")
def reports() -> list[tuple[int, int, str]]:
    """The progress reports of `llm`."""
    return []


@pytest.fixture(scope="module")
def llm(reports: list[tuple[int, int, str]]) -> Iterator[MultiUserLLM]:
    with open_llm(3, progress=lambda *what: reports.append(what)) as llm:
        yield llm


def runner_of(llm: MultiUserLLM) -> WholePrefillRunner:
    runner = llm._runner
    assert isinstance(runner, WholePrefillRunner)
    return runner


@pytest.fixture(scope="module")
def expected(llm: MultiUserLLM) -> list[Heard]:
    """The answers to PROMPTS of an undisturbed engine."""
    return answers(llm)


# Graphs


def test_every_graph_is_compiled_before_the_first_request(
    llm: MultiUserLLM, reports: list[tuple[int, int, str]]
) -> None:
    graphs = [
        "prefill 1 x 16",
        "prefill 2 x 16",
        "prefill 1 x 28",
        "prefill 2 x 28",
        "clear block 0",
        "clear block 1",
        "decode 3 users, 20 positions",
        "decode 3 users, 28 positions",
    ]
    assert reports[-9:] == [
        *((number, 8, what) for number, what in enumerate(graphs)),
        (8, 8, "ready"),
    ]
    assert llm.stats().compiles == 8
    assert llm.stats().batch_invariant


def test_nothing_compiles_while_requests_of_all_lengths_run(llm: MultiUserLLM) -> None:
    lengths = list(range(1, SEQ_LENGTH))
    params = [
        GREEDY,
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, top_p=0.9, repetition_penalty=1.2, min_tokens=2),
    ]
    for number in (1, 2, len(lengths)):  # alone, some slots in use, all of them
        chosen = lengths[-number:]
        results = llm.generate(
            [prompt(length, length) for length in chosen], [params[one % 3] for one in chosen]
        )
        assert {one.finish_reason for one in results} <= {"length", "stop"}
    assert llm.stats().mean_batch > 1
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.rare
def test_the_number_of_graphs_does_not_grow_with_the_users() -> None:
    graphs = {}
    for users in (20, 32):
        with open_llm(users, replace(MODEL, num_layers=1), seq_length=16) as llm:
            graphs[users] = llm.stats().compiles
            llm.generate([[1]] * users, SamplingParams(temperature=0.0, max_tokens=3))
            assert llm.stats().compiles_after_ready == 0
            assert llm.stats().batch_invariant
    prompts, clearing, most_decode_sizes = 2, 1, 3
    assert graphs[20] == graphs[32] == prompts + clearing + most_decode_sizes


@pytest.mark.parametrize("users", [1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 1024])
def test_there_are_at_most_three_decode_sizes(users: int) -> None:
    sizes = batch_sizes(CellLayout.plan(users, SEQ_LENGTH))
    assert len(sizes) <= 3
    assert sizes[-1] == users
    assert list(sizes) == sorted(set(sizes))
    assert min(sizes) == (users if users < 4 else min(4, users // 4))


@pytest.mark.parametrize(
    ("seq_length", "lengths"),
    [(8, (8,)), (16, (16,)), (17, (16, 17)), (64, (16, 32, 64)), (100, (16, 32, 64, 100))],
)
def test_prompts_are_padded_to_powers_of_two(seq_length: int, lengths: tuple[int, ...]) -> None:
    assert prompt_lengths(seq_length) == lengths


def test_several_cells_are_always_decoded_together() -> None:
    layout = CellLayout.plan(8, SEQ_LENGTH, users_per_cell=2)
    assert batch_sizes(layout) == (8,)
    assert prompt_counts(layout, 16) == (1,)


@pytest.mark.parametrize(
    ("users", "length", "counts"),
    [
        (1, 16, (1,)),
        (2, 16, (1, 2)),
        (3, 16, (1, 2)),
        (4, 16, (1, 4)),
        (64, 16, (1, 4)),
        (64, 32, (1, 2)),
        (64, 33, (1,)),
        (64, 512, (1,)),
    ],
)
def test_short_prompts_enter_several_at_a_time(
    users: int, length: int, counts: tuple[int, ...]
) -> None:
    assert prompt_counts(CellLayout.plan(users, 512), length) == counts


# Steps of one number of blocks: of 20 and 28 positions a softmax may sum up in another order.
@pytest.mark.parametrize(("positions", "lengths"), [(16, (3, 5, 8, 7)), (28, (20, 22, 27))])
def test_prompts_that_enter_together_answer_as_alone(
    llm: MultiUserLLM, positions: int, lengths: tuple[int, ...]
) -> None:
    runner = runner_of(llm)
    counts = dict(runner._prompt_counts)
    if counts[positions] == (1,):
        pytest.skip("this machine rounds several prompts differently: they enter one by one")
    assert counts[positions] == (1, 2)
    prompts = [prompt(5 + number, length) for number, length in enumerate(lengths)]
    together = answers(llm, prompts)
    try:
        runner._prompt_counts = dict.fromkeys(counts, (1,))
        alone = [answers(llm, [one])[0] for one in prompts]
    finally:
        runner._prompt_counts = counts
    # To the last bit.
    assert [(one.token_ids, one.logprobs) for one in together] == [
        (one.token_ids, one.logprobs) for one in alone
    ]


def test_prompts_that_would_get_other_bits_together_enter_alone(
    llm: MultiUserLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(llm)
    counts = dict(runner._prompt_counts)
    run_prompts = runner._run_prompts

    def round_differently(slots: Any, prompts: Any, length: int) -> Any:
        results = run_prompts(slots, prompts, length)
        results.device_logits = results.device_logits + 1e-7 * len(slots)
        return results

    monkeypatch.setattr(runner, "_run_prompts", round_differently)
    try:
        for count in counts[16]:
            DEVICE_THREAD.call(partial(runner._try_prompts, 16, count))
        assert runner._prompt_counts == {**counts, 16: (1,)}
    finally:
        runner._prompt_counts = counts


@pytest.mark.parametrize(
    ("blocks", "counts"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))],
)
def test_decode_graphs_read_powers_of_two_blocks(blocks: int, counts: tuple[int, ...]) -> None:
    assert block_counts(blocks) == counts


# Memory


def assert_bytes_per_user(llm: MultiUserLLM) -> None:
    keys_and_values = 2 * MODEL.hidden_size * FLOAT32
    claimed = llm.stats().cache_bytes_per_user
    assert claimed == SEQ_LENGTH * MODEL.num_layers * keys_and_values
    assert claimed == memory.user_bytes(MODEL, runner_of(llm).engine)
    assert cache_bytes(llm) == llm.stats().users * claimed


def test_bytes_per_user_are_those_of_the_caches(llm: MultiUserLLM) -> None:
    assert_bytes_per_user(llm)


@pytest.mark.rare
def test_cells_of_fewer_users_change_nothing_but_the_layout(
    expected: list[Heard],
) -> None:
    llm = open_llm(3, users_per_cell=2, batch_invariant=False)
    assert runner_of(llm)._rows == {3: 3}
    assert answers(llm) == expected
    assert_bytes_per_user(llm)
    stats = llm.stats()
    model = weakref.ref(runner_of(llm).model)
    llm.close()
    assert llm.stats() == stats
    del llm
    gc.collect()
    assert model() is None, "a closed engine without references keeps its model in memory"


# Clean slots


def poison(runner: WholePrefillRunner) -> None:
    """NaN in every block of every slot, as if their last users had filled them."""
    for slot in range(runner.users):
        for block, zeros in enumerate(runner._zeros):
            nan = np.full(zeros.shape, np.nan, np.float32)
            runner._replace(slot, block, Tensor(nan))
        runner._written_blocks[slot] = len(runner._zeros)


def test_an_answer_in_the_same_slot_leaves_no_trace(
    llm: MultiUserLLM, expected: list[Heard]
) -> None:
    assert one_by_one(llm) == expected
    crossing = [PROMPTS[1]]
    assert [answers(llm, crossing)[0] for _ in range(2)] == [expected[1]] * 2


def test_a_slot_that_held_nan_is_new_memory(llm: MultiUserLLM, expected: list[Heard]) -> None:
    DEVICE_THREAD.call(lambda: poison(runner_of(llm)))
    assert answers(llm) == expected
    DEVICE_THREAD.call(lambda: poison(runner_of(llm)))
    assert one_by_one(llm) == expected
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.parametrize(
    ("breaks", "length"),
    [("_forward", 27), pytest.param("_replace_cache", 5, marks=pytest.mark.rare)],
)
def test_a_prompt_that_the_device_broke_off_leaves_no_trace(
    llm: MultiUserLLM,
    expected: list[Heard],
    monkeypatch: pytest.MonkeyPatch,
    breaks: str,
    length: int,
) -> None:
    runner = runner_of(llm)
    working = getattr(runner, breaks)

    def write_and_break(*args: Any) -> None:
        working(*args)
        raise RuntimeError("the device broke")

    write_and_break.compile_cache = working.compile_cache  # type: ignore[attr-defined]

    # The first fills both blocks and breaks. The second breaks while it clears what another left.
    if breaks == "_replace_cache":
        DEVICE_THREAD.call(lambda: poison(runner))
    else:
        answers(llm, [[1]])  # so that the slot is known to have one block in use
    with monkeypatch.context() as patch:
        patch.setattr(runner, breaks, write_and_break)
        broken = llm.generate([prompt(4, length)], GREEDY)
    assert broken[0].finish_reason == "error"
    assert one_by_one(llm) == expected


def test_a_step_that_an_operator_refuses_ends_its_own_requests_alone(
    llm: MultiUserLLM, expected: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_vocab_size", MODEL.vocab_size + 1)
        failed = llm.submit([1, MODEL.vocab_size], params=GREEDY).result()
    assert failed.finish_reason == "error"
    assert answers(llm, PROMPTS[:1]) == expected[:1]


# Resizing; from here on `llm` has fewer slots


def test_running_requests_move_to_another_layout(llm: MultiUserLLM, expected: list[Heard]) -> None:
    handles = [llm.submit(one, params=GREEDY) for one in PROMPTS]
    for handle in handles:
        next(handle)
    resize(llm, 2)
    assert [Heard(handle.result()) for handle in handles] == expected
    assert llm.stats().users == 2
    assert llm.stats().compiles_after_ready == 0
    assert_bytes_per_user(llm)


def test_a_resize_that_the_device_refuses_goes_back(
    llm: MultiUserLLM, expected: list[Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = llm.stats().users
    model = runner_of(llm).model
    lay_out = model.set_layout

    def refuse(layout: CellLayout) -> None:
        if layout.users == 9:
            raise MemoryError("9 are too many")
        lay_out(layout)

    handles = [llm.submit(one, params=GREEDY) for one in PROMPTS]
    next(handles[0])
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "set_layout", lambda self, layout: refuse(layout))
        with pytest.raises(MemoryError, match="9 are too many"):
            resize(llm, 9)
    assert [Heard(handle.result()) for handle in handles] == expected
    assert llm.stats().users == users
    assert llm.stats().compiles_after_ready == 0
    assert_bytes_per_user(llm)


@pytest.mark.parametrize(
    ("config", "users", "seq_length", "users_per_cell", "count"),
    # As docs/portable.md has them, and with several cells.
    [
        (MODEL, 8, 512, None, 14),
        (MODEL, 32, 2048, None, 30),
        (MODEL, 8, 512, 4, 10),
        (CAUSAL, 32, 512, None, 12),
        (CAUSAL, 8, 2048, None, 24),
        (CAUSAL, 8, 512, 1, 8),
    ],
)
def test_the_number_of_graphs_is_known_before_anything_is_compiled(
    config: AnyModelConfig, users: int, seq_length: int, users_per_cell: Optional[int], count: int
) -> None:
    engine = EngineConfig(
        users, seq_length, users_per_cell=users_per_cell, kernels="portable", batch_invariant=False
    )

    def jobs() -> list[str]:
        device.configure("CPU", 0)
        runner = make_runner(make_model(config, PortableBackend()), engine)
        return [what for what, _ in runner._jobs()]

    counts = graph_counts(config, engine)
    assert sum(counts.values()) == count
    named = DEVICE_THREAD.call(jobs)
    for word, kind in (("prefill", "prefill"), ("clear", "replace a block of the caches")):
        assert sum(what.startswith(word) for what in named) == counts[kind]
    assert len(named) == count
