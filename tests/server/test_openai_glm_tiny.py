"""`/v1/*` of the real command with the real small model and the official client."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from glm_multiuser.tokenizers import load_tokenizer
from tests.conftest import SEQ_LENGTH, USERS
from tests.server.openai_reading import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    ask,
    ask_both_ways,
    async_client,
    question,
    sync_client,
)
from tests.server.process import MODEL, ROOT, ServerProcess

HELLO = "你好"
GOODBYE = "再见"  # its answer ends with an emoji, which comes in bytes
QUESTIONS = (HELLO, "你是谁", GOODBYE, "Who are you?", "1 + 1 = ?")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with sync_client(server.url) as client:
        yield client


@pytest.mark.parametrize("text", QUESTIONS)
def test_streams_join_to_whole_answers(server: ServerProcess, text: str) -> None:
    for number, temperature in enumerate((0.0, 0.7, 1.5, 8.0)):
        ask_both_ways(
            server.url,
            CHAT if number % 2 else COMPLETIONS,
            **({"messages": question(text)} if number % 2 else {"prompt": text}),
            temperature=temperature,
            seed=number,
            max_tokens=40,
            logprobs=True if number % 2 else 2,
            return_token_ids=True,
        )


def test_the_same_json_alone_and_beside_others(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["好", "bad"]}, "note": {"type": "string", "maxLength": 9}},
        "required": ["mood", "note"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}

    def answer(number: int) -> str:
        body = {"messages": question(QUESTIONS[number]), "seed": number, "temperature": number % 2}
        return ask(server.url, CHAT, response_format=wanted, **body).choices[0].text

    numbers = range(len(QUESTIONS))
    alone = [answer(number) for number in numbers]
    for text in alone:
        jsonschema.validate(json.loads(text), schema)
    with ThreadPoolExecutor(len(numbers)) as pool:
        assert list(pool.map(answer, numbers)) == alone


def test_an_emoji_comes_whole(server: ServerProcess) -> None:
    choice = ask_both_ways(server.url, CHAT, messages=question(GOODBYE)).choices[0]
    assert choice.text == "再见！愿你今天有好天气，下次带朋友一起来聊。👋"
    assert choice.finish_reason == "stop"


@pytest.mark.slow
def test_no_stop_string_leaks(server: ServerProcess) -> None:
    """Every part of an answer, 2 or 6 characters long, ends it where it first comes."""
    messages = question(GOODBYE)
    known = ask(server.url, CHAT, messages=messages).choices[0].text
    stops = sorted(
        {known[at : at + size] for size in (2, 6) for at in range(len(known) - size + 1)}
    )
    assert len(stops) > 30

    def text_until(stop: str) -> tuple[str, Any]:
        choice = ask_both_ways(server.url, CHAT, messages=messages, stop=stop).choices[0]
        return choice.text, choice.finish_reason

    with ThreadPoolExecutor(USERS) as pool:
        answers = list(pool.map(text_until, stops))
    assert answers == [(known[: known.index(stop)], "stop") for stop in stops]


def test_the_first_of_several_stop_strings_ends_the_answer(server: ServerProcess) -> None:
    body = {"messages": question(HELLO), "temperature": 0}
    known = ask(server.url, CHAT, **body).choices[0].text
    choice = ask_both_ways(server.url, CHAT, stop=[known[20:23], known[9:11], "∅"], **body)
    assert choice.choices[0].text == known[:9]


def test_tokens_of_the_prompt_are_the_prompt(server: ServerProcess) -> None:
    tokenizer = load_tokenizer(ROOT / "ckpt" / MODEL)
    assert tokenizer is not None
    chat = ask(server.url, CHAT, messages=question(HELLO), return_token_ids=True)
    ids = tokenizer.encode_prompt(HELLO)
    for prompt in (HELLO, ids, [ids]):
        assert ask(server.url, COMPLETIONS, prompt=prompt, return_token_ids=True) == chat
    choice = chat.choices[0]
    assert tokenizer.decode(choice.token_ids) == choice.text
    assert chat.usage is not None
    assert chat.usage["prompt_tokens"] == len(ids)
    assert chat.usage["completion_tokens"] == len(choice.token_ids)


def test_an_answer_is_cut_at_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=question(HELLO), max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_choices_have_seeds_of_their_own(server: ServerProcess) -> None:
    body = {"messages": question("讲一个故事"), "temperature": 1.5, "max_tokens": 30}
    together = ask_both_ways(server.url, CHAT, n=USERS, seed=11, **body)
    alone = [ask(server.url, CHAT, seed=11 + number, **body) for number in range(USERS)]
    assert [together.choices[number] for number in range(USERS)] == [
        one.choices[0] for one in alone
    ]
    assert len({one.choices[0].text for one in alone}) > 1


def test_logprobs_are_those_of_one_distribution(server: ServerProcess) -> None:
    body = {"messages": question(HELLO), "logprobs": True, "top_logprobs": 20, "max_tokens": 20}
    for temperature in (0, 2.0):
        choice = ask(server.url, CHAT, temperature=temperature, seed=2, **body).choices[0]
        for entry in choice.logprobs["content"]:
            top = [one["logprob"] for one in entry["top_logprobs"]]
            assert top == sorted(top, reverse=True)
            assert sum(map(math.exp, top)) <= 1 + 1e-6
            assert entry["logprob"] <= top[0]
            if temperature == 0:
                assert entry["token"] == entry["top_logprobs"][0]["token"]
            shown = [one for one in entry["top_logprobs"] if one["bytes"] == entry["bytes"]]
            assert (
                entry["logprob"] in [one["logprob"] for one in shown] or entry["logprob"] < top[-1]
            )


@pytest.mark.parametrize("text", QUESTIONS)
def test_texts_of_logprobs_join_to_the_answer(server: ServerProcess, text: str) -> None:
    body = {"messages": question(text), "logprobs": True, "temperature": 0}
    choice = ask_both_ways(server.url, CHAT, **body).choices[0]
    written = b"".join(bytes(entry["bytes"]) for entry in choice.logprobs["content"])
    assert written.decode() == choice.text


def test_a_conversation_is_remembered(client: openai.OpenAI) -> None:
    first: Any = client.chat.completions.create(model=MODEL, messages=question(HELLO))
    answered = first.choices[0].message.model_dump(exclude_unset=True)
    messages = [*question(HELLO), answered, *question("你是谁")]
    second = client.chat.completions.create(model=MODEL, messages=messages)
    alone = client.chat.completions.create(model=MODEL, messages=question("你是谁"))
    assert second.usage is not None
    assert alone.usage is not None
    assert second.usage.prompt_tokens > alone.usage.prompt_tokens


def test_many_users_at_once_get_the_answers_that_they_get_alone(server: ServerProcess) -> None:
    async def answer(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=question(text), stream=True, user=text
        )
        chunks = [chunk async for chunk in stream]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def run() -> None:
        async with async_client(server.url) as client:
            together = await asyncio.gather(*(answer(client, text) for text in QUESTIONS * 2))
            alone = [await answer(client, text) for text in QUESTIONS]
            assert together == alone * 2

    asyncio.run(run())


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"seq_length {SEQ_LENGTH}") as error:
        client.chat.completions.create(model=MODEL, messages=question("很长" * 10_000))
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, '"messages": [{"role": "user", "content": "\\ud800"}]', "messages"),
        (
            CHAT,
            '"messages": [{"role": "user", "content": "\\ud800"}, '
            '{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]',
            "messages",
        ),
        (COMPLETIONS, '"prompt": "\\ud800"', "prompt"),
        (COMPLETIONS, '"prompt": [99999999]', "prompt"),
    ],
)
def test_text_that_is_none(server: ServerProcess, path: str, fields: str, param: str) -> None:
    body = f'{{{fields}, "max_tokens": 1}}'
    response = httpx.post(server.url + path, content=body, **OPTIONS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
