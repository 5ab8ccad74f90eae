"""Keys and values: each user's own, whatever was in the slot, however many blocks and rows.

"The same" means the same bits throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import ArrayLike

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.weights import random_weights
from tests.models.driven_model import DrivenModel, Rows, Stream
from tests.models.golden_cases import check_together, read_reference

USERS, BLOCK, BLOCKS = 8, 32, 3
LENGTH = BLOCK * BLOCKS
CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    inner_hidden_size=256,
    mask_token_id=90,
    gmask_token_id=91,
    bos_token_id=94,
    eos_token_id=95,
)


@pytest.mark.parametrize(
    ("users", "seq_length", "users_per_cell", "sizes", "blocks"),
    [
        (8, 512, None, (8,), (256, 256)),
        (8, 512, 8, (8,), (256, 256)),
        (7, 600, 3, (3, 3, 1), (256, 256, 88)),
        (3, 256, 1, (1, 1, 1), (256,)),
        (1, 20, None, (1,), (20,)),
    ],
)
def test_layout(
    users: int, seq_length: int, users_per_cell: int, sizes: tuple, blocks: tuple
) -> None:
    layout = CellLayout.plan(users, seq_length, users_per_cell=users_per_cell)
    assert layout.sizes == sizes
    assert layout.block_lengths == blocks
    assert layout.seq_length == seq_length


def test_blocks_for() -> None:
    layout = CellLayout.plan(2, 600, 256)
    found = {positions: layout.blocks_for(positions) for positions in (1, 256, 257, 512, 513, 600)}
    assert found == {1: 1, 256: 1, 257: 2, 512: 2, 513: 3, 600: 3}


@pytest.fixture(
    scope="module",
    params=[3, pytest.param(8, marks=pytest.mark.rare)],
    ids="users_per_cell={}".format,
)
def model(request: pytest.FixtureRequest) -> DrivenModel:
    layout = CellLayout.plan(USERS, LENGTH, BLOCK, request.param)
    return DrivenModel(CONFIG, random_weights(11), layout)


@pytest.fixture
def streams(model: DrivenModel) -> dict[int, Stream]:
    """Eight users with prompts of their own, one token into their answers."""
    random = np.random.default_rng(5)
    taken = {}
    for user in range(USERS):
        prompt = [*random.integers(0, 90, 3 + 2 * user).tolist(), 91, 94]
        stream = model.start(prompt)
        stream.take(model.prefill(user, stream, LENGTH), 0)
        taken[user] = stream
    return taken


@contextmanager
def rewound(model: DrivenModel) -> Iterator[None]:
    """Gives every user afterwards the keys and values that it had before."""
    pasts = [model.past(user) for user in range(USERS)]
    yield
    for user, past in enumerate(pasts):
        model.set_past(user, past)


def decoded(model: DrivenModel, running: dict[int, Stream], blocks: int = 1) -> Rows:
    with rewound(model):
        return model.decode(running, blocks)


def same(found: ArrayLike, expected: ArrayLike) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


def poison(model: DrivenModel, user: int) -> None:
    nan = [np.full_like(values, np.nan) for values in model.past(user)]
    model.set_past(user, nan)
    assert np.isnan(model.past(user)).all()


def test_what_is_written_is_read_back(model: DrivenModel) -> None:
    random = np.random.default_rng(1)
    before = [model.past(user) for user in range(USERS)]
    written = [random.standard_normal(values.shape).astype(values.dtype) for values in before[4]]
    model.set_past(4, written)
    for user in range(USERS):
        assert same(model.past(user), written if user == 4 else before[user])


def test_prompt_replaces_all_blocks_that_it_reaches(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    def answered() -> tuple[Stream, list[np.ndarray]]:
        stream = model.start(streams[4].token_ids[:-1])
        stream.take(model.prefill(4, stream, LENGTH), 0)
        for _ in range(3):
            stream.take(model.decode({4: stream}, BLOCKS), 4)
        return stream, model.past(4)

    clean, clean_past = answered()
    poison(model, 4)
    again, again_past = answered()
    assert again.answer == clean.answer
    assert same(again.logits, clean.logits)
    assert same(again_past, clean_past)


def test_behind_a_prompt_there_are_zeros(model: DrivenModel, streams: dict[int, Stream]) -> None:
    # Decode steps add to what is there.
    for user, stream in streams.items():
        past = np.concatenate(model.past(user), axis=3)
        assert (past[:, :, :, stream.prompt_length :] == 0).all()
        assert (past[:, :, :, : stream.prompt_length] != 0).any(axis=(0, 1, 2, 4)).all()


def test_blocks_that_a_prompt_does_not_reach_are_cleared_by_replacing(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    expected = decoded(model, {4: streams[4]}, BLOCKS).logits[4]
    poison(model, 4)
    model.prefill(4, model.start(streams[4].token_ids[:-1]), BLOCK)
    first, *others = model.past(4)
    assert np.isfinite(first).all()
    assert np.isnan(others).all()
    # Over fewer positions, a softmax may sum up in another order.
    one_block = decoded(model, {4: streams[4]}, 1).logits[4]
    np.testing.assert_allclose(one_block, expected, rtol=1e-5, atol=1e-6)
    model.set_past(4, np.zeros_like(others), first_block=1)
    all_blocks = decoded(model, {4: streams[4]}, BLOCKS).logits[4]
    np.testing.assert_allclose(all_blocks, expected, rtol=1e-5, atol=1e-6)


def test_others_do_not_matter(model: DrivenModel, streams: dict[int, Stream]) -> None:
    alone = decoded(model, {4: streams[4]})
    assert same(decoded(model, streams).logits[4], alone.logits[4])
    for user in range(USERS):
        if user != 4:
            poison(model, user)
    rows = decoded(model, streams)
    assert same(rows.logits[4], alone.logits[4])
    assert np.isfinite(rows.finite).tolist() == [user == 4 for user in range(USERS)]


def test_only_rows_in_use_are_written(model: DrivenModel, streams: dict[int, Stream]) -> None:
    before = [model.past(user) for user in range(USERS)]
    running = {user: streams[user] for user in (2, 5)}
    model.decode(running, BLOCKS)
    for user in range(USERS):
        if user in running:
            position = len(streams[user].token_ids) - 1
            after, start = (np.concatenate(past, 3) for past in (model.past(user), before[user]))
            changed = (after != start).any(axis=(0, 1, 2, 4))
            assert changed.nonzero()[0].tolist() == [position]
        else:
            assert same(model.past(user), before[user])


def test_rows_that_are_not_in_use_write_nothing_even_if_not_finite(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    poison(model, 3)
    before = [model.past(user) for user in range(USERS)]
    rows = model.decode({}, BLOCKS)
    assert not np.isfinite(rows.finite[3])
    for user in range(USERS):
        assert same(model.past(user), before[user])


def test_blocks_that_are_not_in_use_do_not_matter(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    one, two, three = (decoded(model, streams, blocks) for blocks in (1, 2, 3))
    assert same(two.logits, one.logits)
    assert same(three.logits, one.logits)


def test_named_user_and_everybody_write_the_same(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    heights = model.invariant_rows((1, USERS))
    with rewound(model):
        together = model.decode(streams, rows=heights[USERS])
        expected = [model.past(user) for user in range(USERS)]
    for user, stream in streams.items():
        rows = model.decode({user: stream}, users=[user], rows=heights[1])
        assert same(rows.logits[0], together.logits[user])
        assert same(model.past(user), expected[user])


@pytest.mark.rare
@pytest.mark.parametrize("model", [USERS], indirect=True, ids="users_per_cell={}".format)
def test_some_users_and_everybody_are_the_same(
    model: DrivenModel, streams: dict[int, Stream]
) -> None:
    # Several users can be named only if one cell holds everybody.
    heights = model.invariant_rows((3, USERS))
    running = {user: streams[user] for user in (6, 1)}
    with rewound(model):
        together = model.decode(running, rows=heights[USERS])
        expected = [model.past(user) for user in range(USERS)]
    # The third row is not in use.
    some = model.decode(running, users=[6, 1, 3], rows=heights[3])
    assert same(some.logits[0], together.logits[6])
    assert same(some.logits[1], together.logits[1])
    assert same(some.tokens[:2], together.tokens[[6, 1]])
    for user in range(USERS):
        assert same(model.past(user), expected[user])


def test_answers_that_go_from_block_to_block() -> None:
    # In blocks of 64, prompts and answers end before, at and behind the ends of all three.
    reference = read_reference("chatglm_6b_3layers")
    layout = CellLayout.plan(len(reference.short), 160, 64)
    ends = {case.name: len(case.token_ids) for case in reference.short}
    assert (ends["len33"], ends["len64"], ends["len100"]) == (35, 66, 102)
    model = DrivenModel.of_folder(reference.folder, layout)
    check_together(model, reference.short, (128,))
