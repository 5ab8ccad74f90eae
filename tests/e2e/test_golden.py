"""The whole engine against the original code: ids in, ids out; text in, text out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from glm_multiuser import GenerationResult, MultiUserLLM, SamplingParams
from glm_multiuser.engine import graph_shapes
from tests.golden_data import golden_folder
from tests.models.golden_cases import Case, Reference, read_reference

TIMEOUT = 120.0


@pytest.fixture(scope="module")
def three() -> Reference:
    return read_reference("chatglm_6b_3layers")


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=3)


def start(folder: Path, **settings: Any) -> MultiUserLLM:
    return MultiUserLLM.from_pretrained(folder, progress=lambda done, total, what: None, **settings)


def fitting(llm: MultiUserLLM, cases: Iterable[Case]) -> list[Case]:
    length = llm.config.seq_length
    return [case for case in cases if len(case.token_ids) + len(case.greedy["fp32"]) <= length]


def answer(llm: MultiUserLLM, cases: Iterable[Case]) -> list[GenerationResult]:
    """Every case at once, each as a user of its own."""
    handles = [
        llm.submit(case.token_ids, params=greedy(len(case.greedy["fp32"])), user=case.name)
        for case in cases
    ]
    return [handle.result(TIMEOUT) for handle in handles]


def check(cases: Iterable[Case], results: Iterable[GenerationResult]) -> None:
    for case, result in zip(cases, results):
        assert result.error is None
        assert list(result.token_ids) == case.greedy["fp32"], case.name
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == len(case.token_ids)
        logits = case.last_logits("fp32").astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids)
        first = result.logprobs[0]
        assert first.token_id == result.token_ids[0]
        assert abs(first.logprob - logprobs[first.token_id]) <= case.tolerance, case.name
        assert list(first.top) == np.argsort(-logprobs)[:3].tolist(), case.name
        for token_id, logprob in first.top.items():
            assert abs(logprob - logprobs[token_id]) <= case.tolerance, case.name


@pytest.fixture(
    scope="module",
    params=[("native", None), pytest.param(("portable", 3), marks=pytest.mark.rare)],
    ids=["native", "portable, cells of three"],
)
def llm(request: pytest.FixtureRequest, three: Reference) -> Iterator[MultiUserLLM]:
    """Eight users. In cells of three there is room for half of the cases, otherwise for all."""
    kernels, users_per_cell = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_shapes, "SMALLEST_PROMPT", 32)  # fewer graphs
        engine = start(
            three.folder,
            users=8,
            seq_length=160 if users_per_cell is None else 64,
            users_per_cell=users_per_cell,
            kernels=kernels,
        )
    with engine:
        yield engine


def test_all_cases_at_once(llm: MultiUserLLM, three: Reference) -> None:
    cases = fitting(llm, three.short)
    assert len(cases) == (20 if llm.config.seq_length == 160 else 9)
    check(cases, answer(llm, cases))
    assert llm.stats().compiles_after_ready == 0


def test_alone_as_with_seven_others(llm: MultiUserLLM, three: Reference) -> None:
    """To the last bit of every logprob: what others do changes nothing."""
    cases = fitting(llm, three.short)[:8]
    together = answer(llm, cases)
    check(cases, together)
    assert llm.stats().batch_invariant
    for case, expected in list(zip(cases, together))[::3]:
        (alone,) = answer(llm, [case])
        assert alone.token_ids == expected.token_ids
        assert alone.logprobs == expected.logprobs


def test_one_user_asks_again_and_again(llm: MultiUserLLM, three: Reference) -> None:
    # Requests of one user run one after the other, in the slot that the last one left.
    cases = fitting(llm, three.short)[-4:]
    handles = [
        llm.submit(case.token_ids, params=greedy(len(case.greedy["fp32"])), user="anna")
        for case in cases
    ]
    check(cases, [handle.result(TIMEOUT) for handle in handles])


@pytest.mark.parametrize(
    ("kernels", "users_per_cell"),
    [("native", None), pytest.param("portable", 3, marks=pytest.mark.rare)],
)
def test_resize_in_the_middle(
    kernels: str,
    users_per_cell: Optional[int],
    three: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_shapes, "SMALLEST_PROMPT", 64)  # fewer graphs
    with start(
        three.folder, users=4, seq_length=58, users_per_cell=users_per_cell, kernels=kernels
    ) as engine:
        cases = fitting(engine, three.short)
        assert len(cases) == 8
        handles = [
            engine.submit(case.token_ids, params=greedy(len(case.greedy["fp32"])), user=case.name)
            for case in cases
        ]
        for handle in handles[:4]:
            assert next(handle).token_ids
        engine.resize(2)
        check(cases, [handle.result(TIMEOUT) for handle in handles])
        assert engine.stats().users == 2
        check(cases, answer(engine, cases))


def test_long_prompts(three: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_shapes, "SMALLEST_PROMPT", 512)  # fewer graphs
    cases = [*three.long, three.short[5]]
    with start(three.folder, users=3, seq_length=640) as engine:
        check(cases, answer(engine, cases))
        assert engine.stats().compiles_after_ready == 0


LOOK_ALIKES = ("[gMASK]", "<sop>", "<eop>", "</s>")
"""The original's chat() reads some of these in a question as special tokens; this library none."""


@pytest.fixture(scope="module")
def text_folder() -> Path:
    return golden_folder("e2e_chatglm_6b", "model.safetensors", "expected.json", "ice_text.model")


@pytest.fixture(scope="module")
def conversations(text_folder: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((text_folder / "expected.json").read_text("utf-8"))
    return expected


@pytest.fixture(scope="module")
def chats(conversations: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        chat
        for chat in conversations["single"]
        if not any(word in f"{chat['query']}{chat['history']}" for word in LOOK_ALIKES)
    ]
    assert len(found) == len(conversations["single"]) - 1
    return found


@pytest.fixture(scope="module")
def text_llm(text_folder: Path) -> Iterator[MultiUserLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_shapes, "SMALLEST_PROMPT", 256)  # a single graph for prompts
        engine = start(text_folder, users=3, seq_length=160)
    with engine:
        yield engine


GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def test_chat(text_llm: MultiUserLLM, chats: list[dict[str, Any]]) -> None:
    def ask(number: int) -> None:
        chat = chats[number]
        found, added = text_llm.chat(
            chat["query"], history=chat["history"], user=number, params=GREEDY
        )
        assert found == chat["response"]
        expected = [*chat["history"], [chat["query"], chat["response"]]]
        assert [list(one) for one in added] == expected

    with ThreadPoolExecutor(len(chats)) as threads:
        list(threads.map(ask, range(len(chats))))


def test_session(text_llm: MultiUserLLM, conversations: dict[str, Any]) -> None:
    history: list[Any] = []
    turns = conversations["session"]
    assert len(turns) == 3
    for turn in turns:
        answer, history = text_llm.chat(turn["query"], history=history, user="anna", params=GREEDY)
        assert answer == turn["response"]
    assert history == [(turn["query"], turn["response"]) for turn in turns]


def test_pieces_join_to_the_text(text_llm: MultiUserLLM, chats: list[dict[str, Any]]) -> None:
    handles = [
        text_llm.stream_chat(chat["query"], history=chat["history"], user=number, params=GREEDY)
        for number, chat in enumerate(chats)
    ]
    for chat, handle in zip(chats, handles):
        pieces = list(handle)
        assert "".join(piece.text for piece in pieces) == chat["raw_decoded"]
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        assert token_ids == chat["output_ids"]
        reasons = [piece.finish_reason for piece in pieces]
        assert reasons == [None] * (len(pieces) - 1) + ["length"]
        assert handle.result(TIMEOUT).text == chat["raw_decoded"]


def test_prompts_are_those_of_the_original(
    text_llm: MultiUserLLM, chats: list[dict[str, Any]]
) -> None:
    assert text_llm.tokenizer is not None
    for chat in chats:
        assert text_llm.tokenizer.encode_prompt(chat["query"], chat["history"]) == chat["input_ids"]
