"""Models and whole answers of `/v1/*`, with a numpy model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Optional

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from glm_multiuser import MultiUserLLM
from tests.engine.mock_runner import EOS, SEQ_LENGTH, VOCAB
from tests.server.asking import HTTP
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
)
from tests.server.openai_reading import (
    CHAT,
    COMPLETIONS,
    OTHER,
    ask,
    ask_both_ways,
    parse,
    question,
    sync_client,
)

HELLO = question("hello")
SETTINGS = mock_settings(users=4, max_queue=64, names=(MODEL, OTHER))


def test_models_that_answer_are_listed(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert listed.object == "list"
    assert [model.id for model in listed.data] == [MODEL, OTHER]
    for model in listed.data:
        anthropics = ["type", "display_name", "created_at", "lifecycle"]
        parse(Model, model.to_dict(), vendor=["max_model_len", *anthropics])
        assert client.models.retrieve(model.id) == model
        assert model.to_dict()["max_model_len"] == SEQ_LENGTH


def test_a_model_that_nobody_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-9")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match=f"{MODEL}, {OTHER}") as error:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_a_model_that_is_not_ready() -> None:
    with in_process_server(SETTINGS) as server, sync_client(server.url) as client:
        HTTP.get(server.url + "/v1/models").raise_for_status()
        unloading = server.service.models.unload(OTHER)
        asyncio.run_coroutine_threadsafe(unloading, server.loop).result(PATIENCE)
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="unloaded") as missing:
            client.models.retrieve(OTHER)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.InternalServerError) as unready:
            client.chat.completions.create(model=OTHER, messages=HELLO)
        assert (unready.value.status_code, unready.value.code) == (503, "model_not_ready")


def test_without_a_name_the_first_model_answers(mock: InProcessServer) -> None:
    response = HTTP.post(mock.url + CHAT, json={"messages": HELLO, "max_tokens": 1})
    assert response.json()["model"] == MODEL
    response = HTTP.post(mock.url + CHAT, json={"messages": HELLO, "model": OTHER})
    assert response.json()["model"] == OTHER


def test_a_chat_answer_has_every_field(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=5
    )
    answer = parse(ChatCompletion, json.loads(raw.text))
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.refusal) == ("assistant", None)
    assert choice.message.content
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 5, 11)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    again = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
    assert again.choices == answer.choices
    assert again.id != answer.id


def test_a_completion_has_every_field(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5)
    answer = parse(Completion, json.loads(raw.text))
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)


def test_times_are_unix_times(mock: InProcessServer, client: openai.OpenAI) -> None:
    before = int(time.time())
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    completion = client.completions.create(model=MODEL, prompt="hello", max_tokens=1)
    after = int(time.time())
    assert before <= chat.created <= completion.created <= after
    assert client.models.retrieve(MODEL).created == mock.service.models.get(MODEL).created


def test_text_in_completions_is_a_question(mock: InProcessServer) -> None:
    chat = ask(mock.url, CHAT, messages=question("What?"))
    completion = ask(mock.url, COMPLETIONS, prompt="What?")
    assert completion.choices[0].text == chat.choices[0].text
    assert completion.usage == chat.usage


def test_the_conversation_so_far_counts(mock: InProcessServer) -> None:
    system = {"role": "system", "content": "be brief"}
    answered = {"role": "assistant", "content": "hi"}
    longer = [system, *HELLO, answered, *question("again")]
    texts = [
        ask(mock.url, CHAT, messages=messages, max_tokens=8).choices[0].text
        for messages in (longer, longer[1:], longer[-1:])
    ]
    assert len(set(texts)) == 3
    as_developer = [{**system, "role": "developer"}, *longer[1:]]
    assert ask(mock.url, CHAT, messages=as_developer, max_tokens=8).choices[0].text == texts[0]


def test_parts_of_a_text_are_one_text(mock: InProcessServer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}]
    assert ask(mock.url, CHAT, messages=messages) == ask(mock.url, CHAT, messages=HELLO)


def test_both_names_of_the_longest_answer(mock: InProcessServer) -> None:
    for fields in (
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ):
        answer = ask(mock.url, CHAT, messages=HELLO, ignore_eos=True, **fields)
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 3
        assert answer.choices[0].finish_reason == "length"


def test_an_answer_may_end_where_the_sequence_does(mock: InProcessServer) -> None:
    answer = ask_both_ways(
        mock.url, COMPLETIONS, prompt=[1] * 90, max_tokens=10**6, ignore_eos=True
    )
    assert answer.usage is not None
    assert answer.usage["total_tokens"] == SEQ_LENGTH
    assert answer.choices[0].finish_reason == "length"


def test_every_way_to_sample_changes_the_answer(mock: InProcessServer) -> None:
    def tokens(**fields: Any) -> list[int]:
        body = {"messages": HELLO, "max_tokens": 16, "return_token_ids": True, **fields}
        return ask_both_ways(mock.url, CHAT, **body).choices[0].token_ids

    greedy = tokens()
    assert tokens(temperature=50.0, seed=1) != greedy
    assert tokens(temperature=50.0, seed=1, top_k=1) == greedy
    assert tokens(temperature=50.0, seed=1, top_p=0.001) == greedy
    assert tokens(repetition_penalty=50.0) != greedy
    assert tokens(stop_token_ids=[greedy[2]]) == greedy[:3]
    *others, last = range(VOCAB)
    assert tokens(stop_token_ids=others, min_tokens=4)[:4] == [last] * 4
    ended = [seed for seed in range(20) if EOS in tokens(seed=seed, temperature=9.0)]
    assert ended
    for seed in ended[:3]:
        assert len(tokens(seed=seed, temperature=9.0, ignore_eos=True)) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_user_names_a_session(mock: InProcessServer, client: openai.OpenAI, stream: bool) -> None:
    body: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream": stream}

    def ask_as(user: str, **headers: str) -> None:
        answer: Any = client.chat.completions.create(user=user, extra_headers=headers, **body)
        assert list(answer)

    ask_as(f"anna {stream}")
    ask_as("nobody", **{"X-Session-Id": f"bela {stream}"})
    users = {slot["user"] for slot in HTTP.get(mock.url + "/status").json()["slots"]}
    assert {f"anna {stream}", f"bela {stream}"} <= users
    assert "nobody" not in users


def without_tokenizer(*arguments: Any, **options: Any) -> MultiUserLLM:
    llm = mock_llm(*arguments, **options)
    llm.tokenizer = None
    return llm


@pytest.fixture(scope="module")
def numbers_only() -> Iterator[str]:
    with in_process_server(open_llm=partial(without_tokenizer)) as server:
        yield server.url


def test_token_ids_in_and_out_without_a_tokenizer(mock: InProcessServer, numbers_only: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 9, "return_token_ids": True, "logprobs": 1}
    choice = ask_both_ways(numbers_only, COMPLETIONS, **body).choices[0]
    assert choice.text == ""
    assert choice.token_ids == ask(mock.url, COMPLETIONS, **body).choices[0].token_ids
    kept = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
    assert choice.logprobs["tokens"] == [f"token_id:{token_id}" for token_id in kept]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": HELLO}, "messages"),
        (COMPLETIONS, {"prompt": "hello"}, "prompt"),
        (COMPLETIONS, {"prompt": [1], "stop": "x"}, "stop"),
    ],
)
def test_text_is_refused_without_a_tokenizer(
    numbers_only: str, path: str, fields: dict[str, Any], param: Optional[str]
) -> None:
    response = HTTP.post(numbers_only + path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert "tokenizer" in response.json()["error"]["message"]
