"""benchmarks/plain_server.py, the baseline of the load test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import httpx
import pytest

from glm_multiuser import Piece, Usage
from tests.server.process import ROOT

CLIENTS = 60
"""More than the threads that Starlette has by default, 40."""


class Stream:
    """An answer of two pieces."""

    def __iter__(self) -> Iterator[Piece]:
        yield Piece("a", (1,))
        yield Piece("b", (2,), "length")

    def result(self) -> SimpleNamespace:
        return SimpleNamespace(usage=Usage(3, 2))


class Model:
    def stream_chat(self, prompt: str, params: object) -> Stream:
        return Stream()


def test_more_clients_than_threads_get_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    app = import_module("plain_server").create_app(Model())
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}

    async def ask_all() -> list[httpx.Response]:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://plain")
        async with app.router.lifespan_context(app), client:
            asked = [client.post("/v1/chat/completions", json=body) for _ in range(CLIENTS)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
