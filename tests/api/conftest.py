"""Engines around a model in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Optional

import pytest

from glm_multiuser import EngineConfig, MultiUserLLM, SamplingParams
from tests.api.fake_tokenizer import FakeTokenizer
from tests.api.mocked import Open
from tests.engine.mock_runner import EOS, SEQ_LENGTH, Call, Gate, MockRunner


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def open_llm(gate: Gate) -> Iterator[Open]:
    """Makes engines around mocks, and closes them; `gated` ones stop before every step."""
    opened: list[MultiUserLLM] = []

    def make(
        users: int = 2,
        tokenizer: Optional[FakeTokenizer] = None,
        params: Optional[SamplingParams] = None,
        gated: bool = False,
        before: Callable[[Call], None] = lambda call: None,
        **settings: Any,
    ) -> MultiUserLLM:
        runner = MockRunner(users, gate if gated else before)
        config = EngineConfig(users=users, seq_length=SEQ_LENGTH, **settings)
        llm = MultiUserLLM(
            runner,  # type: ignore[arg-type]
            config,
            tokenizer,
            params or SamplingParams(),
            (EOS,),
            1.5,
        )
        opened.append(llm)
        return llm

    yield make
    gate.open()
    for llm in opened:
        llm.close(drain=0.0)


@pytest.fixture
def llm(open_llm: Open) -> MultiUserLLM:
    return open_llm(tokenizer=FakeTokenizer())


@pytest.fixture
def llm_of_ids(open_llm: Open) -> MultiUserLLM:
    return open_llm()
