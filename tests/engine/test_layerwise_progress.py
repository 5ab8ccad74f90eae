"""Layer-wise prefill of ChatGLM-6B: which prompts pass which layers in which step."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from glm_multiuser.engine.layerwise_progress import LayerRange, LayerwiseProgress
from glm_multiuser.engine.request import Request
from tests.engine.scheduling import new_request

LAYERS, ROOM = 4, 10
ALL = LayerRange(0, LAYERS + 1)
"""The final norm counts as a layer."""


def prompts_of(*lengths: int) -> list[Request]:
    return [new_request(length=length) for length in lengths]


def step(progress: LayerwiseProgress, waiting: list[Request]) -> tuple[list[Request], LayerRange]:
    """What one step does: it asks, and goes on if it does not fail."""
    group = list(progress.group(waiting))
    layers = progress.layers_of(group)
    progress.advance(group, layers)
    return group, layers


def test_prompts_that_fit_go_through_all_layers_at_once() -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    waiting = prompts_of(3, 7, 1)
    assert step(progress, waiting) == (waiting[:2], ALL)
    assert step(progress, waiting[2:]) == (waiting[2:], ALL)


def test_a_group_goes_on_where_it_was_whoever_comes_behind_it() -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    waiting = prompts_of(2 * ROOM)
    assert step(progress, waiting) == (waiting[:1], LayerRange(0, 2))
    waiting += prompts_of(1, 1)
    assert step(progress, waiting) == (waiting[:1], LayerRange(2, LAYERS + 1))
    assert step(progress, waiting[1:]) == (waiting[1:], ALL)


def test_a_prompt_that_is_much_longer_goes_through_one_layer_in_each_step() -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    waiting = prompts_of(100 * ROOM)
    ranges = [step(progress, waiting)[1] for _ in range(LAYERS)]
    assert ranges == [(0, 1), (1, 2), (2, 3), (3, LAYERS + 1)]
    assert step(progress, waiting)[1] == (0, 1), "it is through, and the next one begins"


def test_a_step_that_fails_is_made_again() -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    waiting = prompts_of(2 * ROOM)
    step(progress, waiting)
    layers = progress.layers_of(progress.group(waiting))  # and nobody calls `advance`
    assert step(progress, waiting) == (waiting, layers)


def test_the_next_prompt_begins_at_the_first_layer_after_a_cancel_in_the_middle() -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    cancelled, *others = prompts_of(2 * ROOM, 2 * ROOM, 1)
    step(progress, [cancelled, *others])
    assert step(progress, others) == (others[:1], LayerRange(0, 2))
    assert step(progress, others) == (others[:1], LayerRange(2, LAYERS + 1))


def test_a_group_begins_again_after_a_cancel_of_one_of_its_prompts() -> None:
    # It takes a group of several to be cut by hand: those that fit together need one step.
    progress = LayerwiseProgress(LAYERS, ROOM)
    first, second = prompts_of(6, 6)
    progress.advance([first, second], LayerRange(0, 3))
    assert progress.group([first, second]) == [first, second]
    assert progress.layers_of([first, second]) == (3, LAYERS + 1)
    assert step(progress, [second]) == ([second], ALL)
    assert step(progress, [first, second]) == ([first], ALL), "what was on the way is forgotten"


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5 * ROOM), min_size=1, max_size=6),
    cancelled=st.lists(st.integers(0, 20), max_size=3),
)
def test_every_prompt_goes_through_every_layer_in_order(
    lengths: list[int], cancelled: list[int]
) -> None:
    progress = LayerwiseProgress(LAYERS, ROOM)
    waiting = prompts_of(*lengths)
    through: dict[Request, int] = {}
    number = 0
    while waiting:
        if number in cancelled:
            through.pop(waiting.pop(0), None)
        number += 1
        if not waiting:
            break
        before = copy.copy(vars(progress))
        for others in (waiting, waiting[::-1], waiting[1:], waiting):
            if others:
                progress.layers_of(progress.group(others))
        assert vars(progress) == before, "a question changed something"
        group, layers = step(progress, waiting)
        assert group == waiting[: len(group)]
        assert layers.first < layers.last <= LAYERS + 1
        for request in group:
            assert layers.first in (0, through.get(request, 0))
            through[request] = layers.last
        tokens = sum(len(request.prompt_token_ids) for request in group)
        assert len(group) == 1 or tokens <= ROOM
        done = layers.last == LAYERS + 1
        waiting = waiting[len(group) :] if done else waiting
        assert done or all(through[request] <= LAYERS for request in group)
