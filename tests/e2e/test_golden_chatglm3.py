"""Text-in, text-out conversations of the original ChatGLM3 code, through the whole library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser import MultiUserLLM, SamplingParams
from tests.golden_data import golden_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("e2e_chatglm3_6b", "model.safetensors", "expected.json")


@pytest.fixture(scope="module")
def conversations(folder: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))
    return expected


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[MultiUserLLM]:
    with MultiUserLLM.from_pretrained(folder, users=4, seq_length=512, prefill_chunk=64) as llm:
        yield llm


def test_single_questions(llm: MultiUserLLM, conversations: dict[str, Any]) -> None:
    chats = conversations["single"]
    assert len(chats) == 11
    results = llm.generate([chat["input_ids"] for chat in chats], GREEDY)
    for chat, result in zip(chats, results):
        assert list(result.token_ids) == chat["output_ids"]
        ended = chat["output_ids"][-1] in chat["eos_token_ids"]
        assert result.finish_reason == ("stop" if ended else "length")


def test_prompts_are_those_of_the_original(
    llm: MultiUserLLM, conversations: dict[str, Any]
) -> None:
    assert llm.tokenizer is not None
    plain = [
        chat
        for chat in conversations["single"]
        if chat["role"] == "user" and "<|" not in f"{chat['query']}{chat['history']}"
    ]
    assert len(plain) > 5
    for chat in plain:
        # `history` is what the original made of the conversation, the question included.
        earlier = [one for one in chat["history"] if "tools" not in one]
        if earlier and earlier[-1] == {"role": "user", "content": chat["query"]}:
            earlier = earlier[:-1]
        assert llm.tokenizer.encode_prompt(chat["query"], earlier) == chat["input_ids"]


def test_a_session_goes_on_in_its_slot(llm: MultiUserLLM, conversations: dict[str, Any]) -> None:
    cached = []
    for turn in conversations["session"]:
        handle = llm.submit(turn["input_ids"], params=GREEDY, user="anna")
        result = handle.result(TIMEOUT)
        assert list(result.token_ids) == turn["output_ids"]
        cached.append(result.usage.cached_tokens)
    assert cached[0] == 0
    assert min(cached[1:]) > 16
    assert llm.stats().compiles_after_ready == 0
