"""The public API from an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from glm_multiuser import (
    GenerationError,
    InvalidParameterError,
    MultiUserLLM,
    Piece,
    SamplingParams,
)
from glm_multiuser.device_thread import DEVICE_THREAD
from tests.api.fake_tokenizer import FakeTokenizer
from tests.api.mocked import ENDLESS, GREEDY, Open, calls_with, run_async
from tests.engine.driving import PATIENCE
from tests.engine.mock_runner import FAILS_AT_ONCE, FAILS_LATER, VOCAB, Gate

# Streams


async def read(llm: MultiUserLLM, prompt: Any, params: SamplingParams) -> list[Piece]:
    return [piece async for piece in llm.astream_chat(prompt, params=params)]


def test_several_async_streams_at_once(llm: MultiUserLLM) -> None:
    questions = [f"question {number}" for number in range(6)]
    expected = [llm.submit(question, params=GREEDY).result() for question in questions]

    async def all_at_once() -> list[list[Piece]]:
        return await asyncio.gather(*(read(llm, question, GREEDY) for question in questions))

    for pieces, whole in zip(run_async(all_at_once()), expected):
        assert "".join(piece.text for piece in pieces) == whole.text
        assert tuple(one for piece in pieces for one in piece.token_ids) == whole.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * 8 + ["length"]


def test_an_async_stream_raises_what_submit_raises(llm_of_ids: MultiUserLLM) -> None:
    with pytest.raises(InvalidParameterError, match="has no tokenizer"):
        run_async(read(llm_of_ids, "text", GREEDY))


def test_an_async_stream_raises_a_failure(llm_of_ids: MultiUserLLM) -> None:
    with pytest.raises(GenerationError, match="not finite"):
        run_async(read(llm_of_ids, [FAILS_LATER], GREEDY))


def test_a_stop_string_ends_an_async_stream(open_llm: Open) -> None:
    llm = open_llm(users=1, tokenizer=FakeTokenizer())
    text = llm.submit("who", params=GREEDY).result().text
    params = SamplingParams(temperature=0.0, stop=(text[2:5],))
    pieces = run_async(read(llm, "who", params))
    assert "".join(piece.text for piece in pieces) == text[:2]
    assert pieces[-1].finish_reason == "stop"


def test_cancelling_the_task_frees_the_slot(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)

    async def cancel_while_it_waits() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(read(llm, [1], ENDLESS))
        await loop.run_in_executor(None, gate.wait)
        gate.let_pass()
        await loop.run_in_executor(None, gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(cancel_while_it_waits())
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) == 2


def test_a_consumer_that_breaks_out_frees_the_slot(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)

    def one_step() -> None:
        gate.wait()
        gate.let_pass()

    async def break_out() -> None:
        stepping = asyncio.get_running_loop().run_in_executor(None, one_step)
        async for piece in llm.astream_chat([1], params=ENDLESS):
            assert piece.finish_reason is None
            break
        await stepping

    run_async(break_out())
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) <= 2


def test_a_loop_that_is_gone_does_not_disturb_the_engine(open_llm: Open, gate: Gate) -> None:
    llm = open_llm(users=1, gated=True)
    loop = asyncio.new_event_loop()
    stream = llm.astream_chat([1], params=ENDLESS)
    first: asyncio.Task[Any] = loop.create_task(stream.__anext__())  # type: ignore[arg-type]
    loop.call_soon(loop.stop)
    loop.run_forever()
    gate.wait()
    first.cancel()
    loop.run_until_complete(asyncio.gather(first, return_exceptions=True))
    loop.close()
    gate.open()
    assert llm.submit([2], params=GREEDY).result(PATIENCE).finish_reason == "length"


def test_a_request_whose_loop_is_gone_is_cancelled(
    open_llm: Open, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    llm = open_llm(users=1, gated=True)

    async def ask() -> Any:
        return llm.asubmit([1], params=ENDLESS)

    kept = run_async(ask())  # so that it is not cancelled with its last reference
    after = llm.submit([2], params=GREEDY)
    gate.open()
    assert after.result(PATIENCE).finish_reason == "length"
    assert calls_with(llm, (1,)) == 1
    assert kept.finished is None
    # Not for each event.
    assert [one.getMessage() for one in caplog.records] == [
        f"request {kept.number} is cancelled: its receiver failed"
    ]


# Handles


def test_an_async_handle_has_pieces_and_a_result(open_llm: Open) -> None:
    llm = open_llm(tokenizer=FakeTokenizer())
    expected = llm.submit("who", params=GREEDY).result()

    async def ask() -> tuple[str, Any, Any]:
        with llm.asubmit("who", params=GREEDY) as handle:
            assert handle.finished is None
            text = "".join([piece.text async for piece in handle])
            return text, handle.finished, await handle.result()

    text, finished, result = run_async(ask())
    assert text == result.text == expected.text
    assert finished is result
    assert result.token_ids == expected.token_ids


def test_an_async_result_has_the_error_of_its_request(llm_of_ids: MultiUserLLM) -> None:
    async def ask() -> Any:
        return await llm_of_ids.asubmit([FAILS_AT_ONCE], params=GREEDY).result()

    result = run_async(ask())
    assert result.finish_reason == "error"
    assert isinstance(result.error, GenerationError)


def test_asubmit_refuses_at_once(llm_of_ids: MultiUserLLM) -> None:
    async def ask() -> None:
        with pytest.raises(InvalidParameterError, match="from 0 to 49"):
            llm_of_ids.asubmit([VOCAB], params=GREEDY)

    run_async(ask())


def test_pieces_that_wait_can_be_counted(open_llm: Open) -> None:
    llm = open_llm()

    async def ask() -> tuple[int, int]:
        handle = llm.asubmit([1], params=GREEDY)
        first = await handle.__anext__()
        while llm.stats().tokens_generated != GREEDY.max_tokens or llm.stats().active_users:
            await asyncio.sleep(0)
        # Until the step is over that frees the slot, and the loop has taken in its last event.
        await asyncio.to_thread(DEVICE_THREAD.call, lambda: None)
        waiting = handle.waiting_pieces
        await handle.result()
        assert first.token_ids
        return waiting, handle.waiting_pieces

    # Seven more tokens, and the end.
    assert run_async(ask()) == (8, 0)
