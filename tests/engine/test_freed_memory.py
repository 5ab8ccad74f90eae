"""Weights and caches are freed with their last reference, not by garbage collection."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
from mindspore import Parameter

from glm_multiuser import MultiUserLLM
from glm_multiuser.device_thread import DEVICE_THREAD
from glm_multiuser.engine import step_loop
from glm_multiuser.engine.step_loop import FAILED_STEPS_MAX
from glm_multiuser.handle import Handle
from tests.engine.native_llm import open_llm
from tests.engine.small_model import CAUSAL, GREEDY, PROMPTS

pytestmark = pytest.mark.usefixtures("nothing_collected")


def watch(parameters: Iterable[Parameter]) -> list[weakref.ref[Any]]:
    return [weakref.ref(one) for one in parameters]


def alive(watched: list[weakref.ref[Any]]) -> list[str]:
    return [one.name for one in (ref() for ref in watched) if one is not None]


@pytest.mark.slow
def test_a_model_with_native_kernels() -> None:
    opened = [open_llm(2, CAUSAL)]
    opened[0].generate(PROMPTS, GREEDY)
    close_and_drop(opened)


@pytest.mark.slow
def test_a_model_with_mindspore_s_operators_and_its_caches_at_a_resize() -> None:
    llm = open_llm(2, CAUSAL, kernels="portable")
    before = llm.generate(PROMPTS, GREEDY)
    parameters = llm._runner.model.get_parameters()
    caches = watch(one for one in parameters if one.name.endswith("_past"))
    llm.resize(3)
    assert not alive(caches)
    after = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    opened = [llm]
    del llm
    close_and_drop(opened)


def close_and_drop(opened: list[MultiUserLLM]) -> None:
    watched = watch(opened[0]._runner.model.get_parameters())
    opened[0].close()
    assert alive(watched)
    opened.clear()
    assert not alive(watched)


@pytest.mark.slow
def test_an_engine_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop.logger, "disabled", True)  # pytest would keep tracebacks
    llm = open_llm(1)
    break_device(llm)
    results = [handle.result() for handle in DEVICE_THREAD.call(partial(ask_until_it_fails, llm))]
    assert {result.finish_reason for result in results} == {"error"}
    watched, failure = watch(llm._runner.model.get_parameters()), llm.failure
    assert failure is not None
    llm.close()
    del llm
    assert not alive(watched)
    assert str(failure) == "the device failed in 3 steps in a row: the device broke"


def ask_until_it_fails(llm: MultiUserLLM) -> list[Handle]:
    """The last of them is ended by the engine, when it has closed."""
    return [llm.submit(PROMPTS[0], params=GREEDY) for _ in range(FAILED_STEPS_MAX + 1)]


def break_device(llm: MultiUserLLM) -> None:
    def run(step: object) -> None:
        raise RuntimeError("the device broke")

    llm._runner.run = run  # type: ignore[assignment,method-assign]
