"""Merging several answers into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from glm_multiuser.answer import Piece
from glm_multiuser.errors import GenerationError
from glm_multiuser.server.openai.merge import merged


class Source(AsyncIterator[Piece]):
    """An answer whose pieces come when the test puts them in.

    Attributes:
        read: pieces that were read.
        asked: whether the next one is being waited for.
    """

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.read = 0
        self.asked = asyncio.Event()

    def put(self, *items: Any) -> None:
        for item in items:
            self.items.put_nowait(Piece(item, ()) if isinstance(item, str) else item)

    async def __anext__(self) -> Piece:
        self.asked.set()
        try:
            item = await self.items.get()
        finally:
            self.asked.clear()
        if isinstance(item, Exception):
            raise item
        self.read += 1
        return item


END = StopAsyncIteration()


async def texts_of(sources: Sequence[Source]) -> list[tuple[int, str]]:
    return [(index, piece.text) async for index, piece in merged(sources)]


def tasks_beside() -> list[Any]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_piece_comes_once_and_those_of_one_answer_in_order(count: int) -> None:
    async def run() -> None:
        sources = [Source() for _ in range(count)]
        for number, source in enumerate(sources):
            source.put(*(f"{number}.{place}" for place in range(number, 7)), END)
        arrived = await texts_of(sources)
        for number in range(count):
            mine = [text for index, text in arrived if index == number]
            assert mine == [f"{number}.{place}" for place in range(number, 7)]
        assert len(arrived) == sum(7 - number for number in range(count))
        assert not tasks_beside()

    asyncio.run(run())


def test_pieces_come_as_soon_as_they_are_there() -> None:
    async def run() -> None:
        slow, fast = Source(), Source()
        both = merged([slow, fast])
        for text in "abc":
            fast.put(text)
            assert await both.__anext__() == (1, Piece(text, ()))
        slow.put("z")
        assert await both.__anext__() == (0, Piece("z", ()))
        await both.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_ends_the_stream_and_leaves_nothing_running(count: int) -> None:
    async def run() -> None:
        sources = [Source() for _ in range(count)]
        sources[0].put("a", GenerationError("broken"))
        answers = merged(sources)
        assert await answers.__anext__() == (0, Piece("a", ()))
        with pytest.raises(GenerationError, match="broken"):
            await answers.__anext__()
        assert not tasks_beside()
        assert not any(source.asked.is_set() for source in sources)

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_that_is_cancelled_while_it_waits_leaves_nothing_running(count: int) -> None:
    async def run() -> None:
        sources = [Source() for _ in range(count)]
        reading = asyncio.ensure_future(texts_of(sources))
        await asyncio.gather(*(source.asked.wait() for source in sources))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not tasks_beside()
        assert not any(source.asked.is_set() for source in sources)

    asyncio.run(run())


def test_a_reader_that_leaves_between_two_pieces_leaves_nothing_running() -> None:
    async def run() -> None:
        sources = [Source(), Source()]
        sources[0].put("a")
        both = merged(sources)
        await both.__anext__()
        await both.aclose()
        assert not tasks_beside()
        assert not any(source.asked.is_set() for source in sources)

    asyncio.run(run())


def test_nothing_is_read_before_somebody_asks() -> None:
    async def run() -> None:
        sources = [Source(), Source()]
        for source in sources:
            source.put("a", END)
        both = merged(sources)
        await asyncio.sleep(0)  # a task that had been started would run now
        assert [source.read for source in sources] == [0, 0]
        assert len([one async for one in both]) == 2

    asyncio.run(run())
