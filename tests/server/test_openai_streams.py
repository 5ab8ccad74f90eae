"""Streams of `/v1/*` join to the whole answers, in the format that the client expects."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.engine.mock_runner import VOCAB
from tests.server.in_process import (
    MODEL,
    InProcessServer,
)
from tests.server.openai_reading import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_both_ways,
    ask_streaming,
    async_client,
    question,
    stream_chunks,
)

HELLO = question("hello")
ALL_TOKENS = list(range(VOCAB))


def drawn(seed: int, **more: Any) -> dict[str, Any]:
    """Fields of a request whose answer depends on its seed."""
    return {"seed": seed, "temperature": 5.0, "max_tokens": 12, **more}


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_streams_join_to_whole_answers(mock: InProcessServer, path: str, logprobs: bool) -> None:
    reasons, texts = set(), set()
    for seed in range(40):
        body: dict[str, Any] = drawn(seed, return_token_ids=bool(seed % 2))
        body |= {"messages": HELLO} if path == CHAT else {"prompt": [seed + 1, 2]}
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
        choice = ask_both_ways(mock.url, path, **body).choices[0]
        reasons.add(choice.finish_reason)
        texts.add(choice.text)
    assert reasons == {"stop", "length"}
    assert any("\ufffd" in text for text in texts), "no character came in parts"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_without_text(mock: InProcessServer, path: str) -> None:
    """The first token ends it."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    for logprobs in (None, 1 if path == COMPLETIONS else True):
        body = {**prompt, "stop_token_ids": ALL_TOKENS, "logprobs": logprobs}
        answer = ask_both_ways(mock.url, path, **body)
        assert answer.choices[0].text == ""
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 1
        assert len(stream_chunks(mock.url, path, **body)) == (2 if path == CHAT else 1)


@pytest.mark.slow
def test_stop_strings_never_leak(mock: InProcessServer) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 24, "ignore_eos": True}
    known = ask(mock.url, CHAT, **body).choices[0].text
    assert " word" in known, "no token of several characters"
    for stop in substrings(known, (1, 2, 5, 9)):
        choice = ask_both_ways(mock.url, CHAT, stop=stop, **body).choices[0]
        assert choice.text == known[: known.index(stop)]
        assert choice.finish_reason == "stop"


def substrings(text: str, lengths: tuple[int, ...]) -> list[str]:
    return sorted({text[at : at + size] for size in lengths for at in range(len(text) - size + 1)})


def test_the_usage_comes_only_when_asked_for(mock: InProcessServer) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
    assert ask_streaming(mock.url, CHAT, **body).usage is None
    body["stream_options"] = {"include_usage": False}
    assert ask_streaming(mock.url, CHAT, **body).usage is None
    body["stream_options"] = {"include_usage": True}
    assert ask_streaming(mock.url, CHAT, **body).usage == ask(mock.url, CHAT, **body).usage


def test_the_client_reads_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=7)
    texts, reasons = [], []
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=7, stream=True, stream_options=options
    ):
        texts += [choice.delta.content or "" for choice in chunk.choices]
        reasons += [choice.finish_reason for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunk.usage == whole.usage


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    stop = client.chat.completions.create(model=MODEL, messages=HELLO).choices[0].message.content
    assert stop
    body: Any = {"model": MODEL, "messages": HELLO, "stop": stop[-2:], "logprobs": True}
    with client.chat.completions.stream(**body) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**body)
    assert final.choices[0].finish_reason == "stop"
    assert "".join(deltas) == whole.choices[0].message.content
    assert (final.choices[0].message.content or "") == whole.choices[0].message.content
    assert final.choices[0].logprobs == whole.choices[0].logprobs


def test_the_async_client_with_many_streams_at_once(mock: InProcessServer) -> None:
    async def run() -> None:
        async with async_client(mock.url) as client:

            async def streamed(seed: int) -> str:
                body: Any = drawn(seed, model=MODEL, messages=HELLO)
                stream = await client.chat.completions.create(stream=True, **body)
                chunks = [chunk async for chunk in stream]
                return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

            together = await asyncio.gather(*map(streamed, range(12)))
            alone = [await streamed(seed) for seed in range(12)]
            assert together == alone
            assert len(set(alone)) > 6

    asyncio.run(run())
