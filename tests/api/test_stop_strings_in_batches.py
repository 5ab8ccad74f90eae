"""Batches with stop strings: an answer ends at its own, also while another one is waited for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Callable

import pytest

from glm_multiuser import EngineClosedError, MultiUserLLM, SamplingParams
from glm_multiuser.cli.generate import answer_all
from glm_multiuser.cli.generate_input import Job
from tests.api.fake_tokenizer import FakeTokenizer
from tests.api.mocked import GREEDY, Open, runner_of
from tests.engine.mock_runner import Gate

LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
PROMPTS = ["a", "who"]


def in_the_library(llm: MultiUserLLM, params: list[SamplingParams]) -> list[str]:
    return [result.text for result in llm.generate(PROMPTS, params)]


def in_the_command(llm: MultiUserLLM, params: list[SamplingParams]) -> list[str]:
    jobs = [Job(place, place, prompt, params[place]) for place, prompt in enumerate(PROMPTS)]
    return [row["text"] for row in answer_all(llm, jobs, users=2)]


@pytest.fixture
def stop(open_llm: Open) -> str:
    """Completed by the fourth token of the second prompt's answer."""
    llm = open_llm(users=1, tokenizer=FakeTokenizer())
    whole = llm.submit(PROMPTS[1], params=GREEDY).result()
    pieces = [FakeTokenizer().decode([one]) for one in whole.token_ids]
    return pieces[2][-1] + pieces[3][0]


@pytest.mark.parametrize("generate", [in_the_library, in_the_command])
def test_an_answer_ends_at_its_stop_string(
    open_llm: Open, gate: Gate, stop: str, generate: Callable[..., list[str]]
) -> None:
    llm = open_llm(users=2, tokenizer=FakeTokenizer(), gated=True)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(generate, llm, [LONG, replace(LONG, max_tokens=70, stop=(stop,))])
        both = 0
        while True:
            call = gate.wait()
            if both and len(call.requests) == 1:
                break
            both += len(call.requests) == 2
            gate.let_pass()
        gate.open()
        texts = running.result()
    assert stop not in texts[1]
    assert both < 60


def test_a_batch_that_cannot_be_submitted_ends(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, tokenizer=FakeTokenizer(), gated=True, max_queue=1)
    errors: list[Any] = []

    def generate() -> None:
        with pytest.raises(EngineClosedError) as raised:
            llm.generate(["a"] * 9, replace(LONG, stop=("no such text",)))
        errors.append(raised.value)

    thread = threading.Thread(target=generate)
    thread.start()
    gate.wait()
    closing = threading.Thread(target=llm.close)
    closing.start()
    gate.open()
    thread.join()
    closing.join()
    assert len(errors) == 1
    assert runner_of(llm).closed
