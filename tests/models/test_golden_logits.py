"""The model's logits and greedy tokens are those of the original code, in every layout."""

from __future__ import annotations

import dataclasses

import pytest

from glm_multiuser.backends.cell_layout import CellLayout
from glm_multiuser.backends.portable.cells import PortableBackend
from glm_multiuser.model_config import ModelConfig
from glm_multiuser.weights import load_weights
from tests.models.driven_model import DrivenModel
from tests.models.golden_cases import (
    Reference,
    check,
    check_alone,
    check_together,
    read_reference,
    with_step_logits,
    worst,
)

SHORT, LONG = 128, 640
"""What prompts are padded to: few lengths, because each is a graph."""


@pytest.fixture(scope="module")
def three() -> Reference:
    return read_reference("chatglm_6b_3layers")


@pytest.fixture(scope="module")
def deep() -> Reference:
    return read_reference("chatglm_6b_28layers")


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.rare), 3, pytest.param(7, marks=pytest.mark.rare)],
    ids="users_per_cell={}".format,
)
def three_layers(request: pytest.FixtureRequest, three: Reference) -> DrivenModel:
    """Seven users in seven cells; in cells of 3, 3 and 1 with three blocks; and in one cell."""
    layout = CellLayout.plan(7, LONG if request.param == 3 else 256, users_per_cell=request.param)
    return DrivenModel.of_folder(three.folder, layout)


def test_three_layers_everybody(three: Reference, three_layers: DrivenModel) -> None:
    cases = three.short + (three.long if three_layers.layout.seq_length == LONG else [])
    check_together(three_layers, cases, (SHORT, LONG))


def test_three_layers_a_named_user(three: Reference, three_layers: DrivenModel) -> None:
    check_alone(three_layers, with_step_logits(three.short), 48, SHORT)


def test_every_position_of_a_prompt(three: Reference, three_layers: DrivenModel) -> None:
    cases = [case for case in three.short if "prompt_all_logits" in case.arrays]
    assert [case.name for case in cases] == ["len1", "len5", "len17"]
    for case in cases:
        stream = three_layers.start(case.token_ids)
        for last, expected in enumerate(case.arrays["prompt_all_logits"]):
            rows = three_layers.prefill(6, stream, SHORT, last)
            assert worst(rows.logits[0], expected) <= case.tolerance, (case.name, last)


@pytest.mark.rare
def test_all_layers_everybody(deep: Reference) -> None:
    """A graph of so many layers compiles for long; three layers show the other ways to ask."""
    cases = deep.short + deep.long
    model = DrivenModel.of_folder(deep.folder, CellLayout.plan(len(cases), LONG))
    check_together(model, cases, (LONG,))


@pytest.mark.rare
def test_all_layers_with_half_precision_rotary_tables(deep: Reference) -> None:
    layout = CellLayout.plan(1, SHORT)
    model = DrivenModel.of_folder(deep.folder, layout, PortableBackend(rotary_dtype="float16"))
    answers = [(case, model.answer_alone(0, case.token_ids, 1, SHORT, 1)) for case in deep.short]
    check(answers, "rope16")


def test_half_precision_rotary_tables(three: Reference) -> None:
    layout = CellLayout.plan(len(three.short), 256)
    model = DrivenModel.of_folder(three.folder, layout, PortableBackend(rotary_dtype="float16"))
    check_together(model, three.short, (SHORT,), "rope16")


def test_depth_of_another_model(three: Reference) -> None:
    config = dataclasses.replace(ModelConfig.from_folder(three.folder), deepnorm_layers=28)
    layout = CellLayout.plan(len(three.short), 256)
    model = DrivenModel(config, load_weights(three.folder, config), layout)
    check_together(model, three.short, (SHORT,), "alpha28")


def test_half_precision(three: Reference) -> None:
    """As a half-precision card would compute.

    The original in float32 but with these rotary tables is the reference. Rounding the weights
    alone changes its logits by 0.06 and two of its twenty answers; activations and caches of 11
    bits add to that. Errors of arithmetic, such as another mask or position, change them by 4
    and more.
    """
    cases = [case for case in three.short if len(case.token_ids) <= 16][:6]
    layout = CellLayout.plan(len(cases), 32)
    model = DrivenModel.of_folder(three.folder, layout, PortableBackend.of("float16"))
    prompts = [case.token_ids for case in cases]
    streams = model.answer_together(prompts, [12] * 6, [16] * 6, 1)
    errors = [
        worst(stream.logits[0], case.last_logits("rope16")) for case, stream in zip(cases, streams)
    ]
    assert max(errors) <= 0.25, errors
    same = [stream.answer == case.greedy["rope16"][:12] for case, stream in zip(cases, streams)]
    assert sum(same) >= 4, same
