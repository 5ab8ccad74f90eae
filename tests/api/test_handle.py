"""A handle without an engine: the test puts the events in itself."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest

from glm_multiuser import GenerationError, Handle
from glm_multiuser.answer import AnswerCollector
from glm_multiuser.engine.request import End, Event, Request, Token
from glm_multiuser.handle import AsyncHandle
from glm_multiuser.sampling import Choice
from glm_multiuser.sampling_params import SamplingParams
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.mock_runner import EOS, VOCAB


class Held:
    """A handle, where its events come from, and how often it cancelled."""

    def __init__(self, **params: Any) -> None:
        request = Request(
            [1], SamplingParams(**params), "user", (EOS,), 50, VOCAB, lambda event: None
        )
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.cancels = 0
        self.answer = AnswerCollector(request, FakeTokenizer())
        self.handle = Handle(self.answer, self.events, self.cancel)

    def cancel(self) -> None:
        self.cancels += 1

    def tokens(self, *token_ids: int) -> None:
        for token_id in token_ids:
            self.events.put(Token(Choice(token_id, None, None), 1.0))

    def end(self, reason: str, error: Any = None) -> None:
        self.events.put(End(reason, error, 0.0, 2.0))


def test_iterate_and_then_ask_for_the_result() -> None:
    held = Held()
    held.tokens(1, 2)
    held.end("length")
    assert [piece.text for piece in held.handle] == ["ab", "c", ""]
    result = held.handle.result()
    assert (result.text, result.finish_reason) == ("abc", "length")
    assert held.handle.result(timeout=0) is result


def test_ask_for_the_result_and_then_iterate() -> None:
    held = Held()
    held.tokens(1, 2)
    held.end("length")
    assert held.handle.result().text == "abc"
    assert list(held.handle) == []


def test_iterate_a_little_and_then_ask_for_the_result() -> None:
    held = Held()
    held.tokens(1, 2)
    held.end("length")
    assert next(held.handle).text == "ab"
    assert held.handle.result().text == "abc"
    with pytest.raises(StopIteration):
        next(held.handle)


@pytest.mark.parametrize("timeout", [0, 0.001, -1])
def test_a_timeout_loses_nothing(timeout: float) -> None:
    held = Held()
    held.tokens(1)
    with pytest.raises(TimeoutError, match=f"still running after {timeout} seconds"):
        held.handle.result(timeout)
    assert held.cancels == 0
    held.tokens(2)
    held.end("length")
    assert held.handle.result(timeout).text == "abc"


def test_what_a_timeout_has_read_can_be_iterated() -> None:
    held = Held()
    held.tokens(1)
    assert next(held.handle).text == "ab"
    held.tokens(2, 3)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            held.handle.result(timeout=0)
    held.tokens(4)
    held.end("length")
    assert [piece.token_ids for piece in held.handle] == [(2,), (3,), (4,), ()]
    assert held.handle.result().token_ids == (1, 2, 3, 4)


def test_a_result_after_a_timeout_ends_the_iteration() -> None:
    held = Held()
    held.tokens(1)
    with pytest.raises(TimeoutError):
        held.handle.result(timeout=0)
    held.end("length")
    assert held.handle.result().text == "ab"
    assert list(held.handle) == []


def test_what_a_cancelled_wait_has_read_can_be_iterated() -> None:
    held = Held()
    held.tokens(1, 2, 3)
    held.end("length")

    async def main() -> tuple[int, list[tuple[int, ...]]]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        handle = AsyncHandle(held.answer, events, held.cancel)
        for _ in range(2):
            events.put_nowait(held.events.get())
        waiting = asyncio.create_task(handle.result())
        while not events.empty():
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        while not held.events.empty():
            events.put_nowait(held.events.get())
        return handle.waiting_pieces, [piece.token_ids async for piece in handle]

    assert asyncio.run(main()) == (4, [(1,), (2,), (3,), ()])


def test_a_failure_is_raised_where_pieces_are_read() -> None:
    held = Held()
    error = GenerationError("broken")
    held.tokens(1)
    held.end("error", error)
    assert next(held.handle).text == "ab"
    with pytest.raises(GenerationError) as caught:
        next(held.handle)
    assert caught.value is error
    assert list(held.handle) == []
    assert held.handle.result().text == "ab"


def test_a_failure_is_part_of_the_result() -> None:
    held = Held()
    error = GenerationError("broken")
    held.end("error", error)
    result = held.handle.result()
    assert (result.finish_reason, result.error) == ("error", error)
    assert list(held.handle) == []


def test_a_failure_without_a_reason_is_one_too() -> None:
    held = Held()
    held.end("error")
    with pytest.raises(GenerationError, match="the request failed"):
        next(held.handle)


def test_cancel_may_be_called_at_any_moment() -> None:
    held = Held()
    held.handle.cancel()
    assert held.cancels == 1
    held.tokens(1)
    held.end("cancelled")
    assert held.handle.result().finish_reason == "cancelled"
    held.handle.cancel()
    assert held.handle.result().finish_reason == "cancelled"


def test_close_cancels_what_still_runs() -> None:
    held = Held()
    held.handle.close()
    assert held.cancels == 1
    held.end("cancelled")
    held.handle.result()
    held.handle.close()
    assert held.cancels == 1


def test_leaving_the_block_cancels_what_still_runs() -> None:
    held = Held()
    with held.handle as handle:
        assert handle is held.handle
        held.tokens(1)
        assert next(handle).text == "ab"
        assert held.cancels == 0
    assert held.cancels == 1


def test_an_error_in_the_block_cancels_and_is_not_swallowed() -> None:
    held = Held()
    with pytest.raises(ZeroDivisionError), held.handle:
        raise ZeroDivisionError
    assert held.cancels == 1


def test_dropping_the_last_reference_cancels() -> None:
    held = Held()
    del held.handle
    assert held.cancels == 1


def test_dropping_a_handle_that_ended_does_nothing() -> None:
    held = Held()
    held.end("length")
    held.handle.result()
    del held.handle
    assert held.cancels == 0


@pytest.mark.parametrize("iterate", [True, False])
def test_a_stop_string_tells_the_engine_to_end(iterate: bool) -> None:
    held = Held(stop="bc")
    held.tokens(1, 2, 7, 7)
    if iterate:
        assert [piece.text for piece in held.handle] == ["a", ""]
    assert held.handle.result().text == "a"
    assert held.cancels >= 1
    assert held.events.qsize() == 2  # what the engine made meanwhile is not looked at
