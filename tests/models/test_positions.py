"""Where the tokens of a sequence stand, checked by hand and against the original code."""

from __future__ import annotations

import numpy as np
import pytest

from glm_multiuser.model_config import ModelConfig
from glm_multiuser.models.positions import PrefixPositions
from tests.models.golden_cases import read_reference

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=32,
    num_layers=1,
    num_attention_heads=2,
    inner_hidden_size=64,
    mask_token_id=90,
    gmask_token_id=91,
    bos_token_id=94,
    eos_token_id=95,
)
MASK, GMASK, SOP = 90, 91, 94

BY_HAND = {
    "usual prompt": ([5, 6, 7, GMASK, SOP], 4, 3),
    "only_gmask_bos": ([GMASK, SOP], 1, 0),
    "resume_after_bos": ([5, GMASK, SOP, 8, 9], 2, 1),
    "mask_in_middle": ([5, MASK, 6, SOP], 3, 1),
    "gmask_in_middle": ([5, GMASK, 6, 7, SOP], 4, 1),
    "mask_and_gmask": ([MASK, 5, GMASK, SOP], 3, 2),
    "first of several counts": ([5, GMASK, GMASK, SOP, 6, SOP], 3, 1),
    "no mask": ([5, 6, SOP], 2, 1),
    "no <sop>": ([5, GMASK, 6], 3, 1),
    "no specials at all": ([5, 6, 7], 3, 2),
    "one token": ([5], 1, 0),
    "only <sop>": ([SOP], 0, 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    token_ids, context_length, mask_position = BY_HAND[name]
    assert PrefixPositions.of(token_ids, CONFIG) == PrefixPositions(context_length, mask_position)


def test_ids_of_prompt_and_answer() -> None:
    ids = PrefixPositions(4, 1).ids(0, 7)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[0, 1, 2, 3, 1, 1, 1], [0, 0, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_ids_of_a_part(start: int) -> None:
    positions = PrefixPositions(4, 1)
    assert (positions.ids(start, 9) == positions.ids(0, 9)[:, start:]).all()


@pytest.mark.parametrize("name", ["chatglm_6b_3layers", "chatglm_6b_28layers"])
def test_original(name: str) -> None:
    reference = read_reference(name)
    config = ModelConfig.from_folder(reference.folder)
    names = {case.name for case in reference.short}
    assert {"only_gmask_bos", "mask_in_middle", "mask_and_gmask", "resume_after_bos"} <= names
    for case in reference.short:
        length, steps = len(case.token_ids), case.arrays["step_position_ids"].shape[1]
        positions = PrefixPositions.of(case.token_ids, config)
        assert (positions.ids(0, length) == case.arrays["position_ids"]).all(), case.name
        found = positions.ids(length, length + steps)
        assert (found == case.arrays["step_position_ids"]).all(), case.name


def test_original_mask() -> None:
    # The context sees itself in both directions, what follows only what came before.
    reference = read_reference("chatglm_6b_3layers")
    config = ModelConfig.from_folder(reference.folder)
    for case in reference.short:
        index = np.arange(len(case.token_ids))
        context_length = PrefixPositions.of(case.token_ids, config).context_length
        visible = (index <= index[:, None]) | (index < context_length)
        assert (visible != case.arrays["attention_mask"]).all(), case.name
