"""Whole conversations: their ids are submitted, and a reader makes content of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser import EngineConfig, InvalidParameterError, MultiUserLLM, SamplingParams
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.tokenizers import ToolCall
from tests.server.echoing import call, echo_llm, message, together
from tests.server.in_process import FOLDER

TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
SAYS = together(message("wait"), call("get_time", city="Oslo"))
CALLED = (ToolCall("get_time", '{"city": "Oslo"}'),)


@pytest.fixture
def llm() -> Iterator[MultiUserLLM]:
    with echo_llm(ModelSettings("echo", FOLDER, EngineConfig(users=2))) as llm:
        yield llm


def ids_of(llm: MultiUserLLM, text: str) -> Any:
    return llm.chat_token_ids([{"role": "user", "content": text}], TOOLS)


def reader_of(llm: MultiUserLLM) -> Any:
    assert llm.tokenizer is not None
    return llm.tokenizer.answer_reader(TOOLS)


def test_ids_are_answered_with_text(llm: MultiUserLLM) -> None:
    """Without a reader it is what the model wrote."""
    result = llm.submit(ids_of(llm, SAYS)).result()
    assert (result.text, result.tool_calls, result.finish_reason) == (SAYS, (), "stop")


def test_a_reader_finds_content_and_calls(llm: MultiUserLLM) -> None:
    handle = llm.submit(ids_of(llm, SAYS), reader=reader_of(llm))
    assert "".join(piece.text for piece in handle) == "wait"
    result = handle.result()
    assert (result.text, result.tool_calls, result.finish_reason) == ("wait", CALLED, "stop")


def test_the_same_with_asyncio(llm: MultiUserLLM) -> None:
    async def run() -> None:
        handle = llm.asubmit(ids_of(llm, SAYS), reader=reader_of(llm))
        assert "".join([piece.text async for piece in handle]) == "wait"
        assert (await handle.result()).tool_calls == CALLED

    asyncio.run(run())


def test_stop_strings_are_looked_for_in_the_content_only(llm: MultiUserLLM) -> None:
    for says, stop, text in (
        (message("one\ntwo"), "\n", "one"),
        (SAYS, "Oslo", "wait"),
        (together(SAYS, message("so")), "\nso", "wait"),
    ):
        params = SamplingParams(temperature=0.0, stop=(stop,))
        result = llm.submit(ids_of(llm, says), params=params, reader=reader_of(llm)).result()
        assert (result.text, result.finish_reason) == (text, "stop")
        assert result.tool_calls == (CALLED if SAYS in says else ())


def test_stop_strings_of_a_chat_are_those_of_a_stream(llm: MultiUserLLM) -> None:
    for says, stop, text in ((message("one\ntwo"), "\n", "one"), (message("so it is"), " ", "so")):
        params = SamplingParams(temperature=0.0, stop=(stop,))
        assert llm.stream_chat(says, params=params).result().text == text
        assert llm.chat(says, params=params) == (text, [(says, text)])


def test_a_call_that_is_cut_is_text(llm: MultiUserLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10)
    says = call("get_time")
    result = llm.submit(ids_of(llm, says), params=params, reader=reader_of(llm)).result()
    assert (result.text, result.tool_calls, result.finish_reason) == (says[:10], (), "length")


def test_a_conversation_that_cannot_be_is_refused(llm: MultiUserLLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[0\] has role 'tool'"):
        llm.chat_token_ids([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidParameterError, match=r"tools\[0\] is"):
        llm.chat_token_ids([{"role": "user", "content": "x"}], [{}])


def test_a_conversation_needs_a_tokenizer(llm: MultiUserLLM) -> None:
    llm.tokenizer = None
    with pytest.raises(InvalidParameterError, match="messages need a tokenizer"):
        ids_of(llm, "x")
