"""Several choices per request, and their log-probabilities."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from glm_multiuser.token_ids import TokenIds
from tests.engine.mock_runner import EOS, Call
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
    ask,
    ask_both_ways,
    question,
    sync_client,
)

HELLO = question("hello")
SETTINGS = mock_settings(users=4, max_queue=64)


@pytest.fixture(scope="module")
def mock() -> Iterator[InProcessServer]:
    """One for all tests of this file; they leave it as it was."""
    with in_process_server(SETTINGS) as server:
        yield server


def drawn(seed: int, **more: Any) -> dict[str, Any]:
    """Fields of a request whose answer depends on its seed."""
    return {"seed": seed, "temperature": 5.0, "max_tokens": 12, **more}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("first", [5, 2**63 - 2])
def test_every_choice_has_the_next_seed(mock: InProcessServer, path: str, first: int) -> None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    together = ask_both_ways(mock.url, path, n=4, **drawn(first), **prompt)
    seeds = [(first + number) % 2**63 for number in range(4)]
    alone = [ask(mock.url, path, **drawn(seed), **prompt) for seed in seeds]
    assert [together.choices[number] for number in range(4)] == [one.choices[0] for one in alone]
    assert len({one.choices[0].text for one in alone}) > 1
    assert together.usage is not None
    assert together.usage["completion_tokens"] == sum(
        one.usage["completion_tokens"] for one in alone if one.usage
    )
    assert together.usage["prompt_tokens"] == 6


def test_choices_without_a_seed_differ(mock: InProcessServer) -> None:
    answer = ask(mock.url, CHAT, messages=HELLO, n=4, temperature=9.0, max_tokens=20)
    assert len({choice.text for choice in answer.choices.values()}) > 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_with_several_answers_is_tokenized_once(
    mock: InProcessServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    llm: Any = mock.llm()
    for name in ("chat_token_ids", "prompt_token_ids"):
        tokenize = getattr(llm, name)

        def note(prompt: Any, *rest: Any, to: Any = tokenize, **options: Any) -> Any:
            if not isinstance(prompt, TokenIds):  # `submit` takes what has been read
                read.append(prompt)
            return to(prompt, *rest, **options)

        monkeypatch.setattr(llm, name, note)
    if path == CHAT:
        ask(mock.url, path, messages=HELLO, n=3, max_tokens=1)
        assert read == [HELLO]
    else:
        ask(mock.url, path, prompt=["a", "bc", "a"], n=2, max_tokens=1)
        assert read == ["a", "bc", "a"]


@pytest.mark.parametrize("prompts", [["a", "bc"], [[1, 2], [3]]])
def test_several_prompts_are_answered_as_each_alone(mock: InProcessServer, prompts: Any) -> None:
    body = drawn(3, n=2, logprobs=2)
    together = ask_both_ways(mock.url, COMPLETIONS, prompt=prompts, **body)
    alone = [ask_both_ways(mock.url, COMPLETIONS, prompt=prompt, **body) for prompt in prompts]
    assert [together.choices[number] for number in range(4)] == [
        one.choices[number] for one in alone for number in range(2)
    ]
    assert together.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together.usage[name] == sum(one.usage[name] for one in alone if one.usage)


def test_choices_come_as_they_are_made() -> None:
    """The model decodes no further than the client has read, so nothing can pile up."""
    read = threading.Semaphore(3)

    def wait(call: Call) -> None:
        if call.kind == "decode":
            assert read.acquire(timeout=PATIENCE)

    settings = mock_settings(users=4, warm_up=())
    body: Any = {"messages": HELLO, "n": 3, "max_tokens": 20, "stream": True}
    begun, begun_before_an_end = set(), None
    with in_process_server(settings, partial(mock_llm, before=wait)) as server:
        with sync_client(server.url) as client:
            for chunk in client.chat.completions.create(model=MODEL, **body):
                read.release()
                begun.add(chunk.choices[0].index)
                if chunk.choices[0].finish_reason and begun_before_an_end is None:
                    begun_before_an_end = set(begun)
        read.release(100)
    assert begun_before_an_end == {0, 1, 2}


def test_logprobs_of_a_chat(mock: InProcessServer) -> None:
    body = {"messages": HELLO, "logprobs": True, "max_tokens": 20, "return_token_ids": True}
    for top in (0, 1, 5, 20):
        choice = ask(mock.url, CHAT, top_logprobs=top, ignore_eos=True, **body).choices[0]
        entries = choice.logprobs["content"]
        assert len(entries) == len(choice.token_ids)
        written = b"".join(bytes(one["bytes"]) for one in entries)
        assert written.decode("utf-8", "replace") == choice.text
        for entry in entries:
            assert len(entry["top_logprobs"]) == top
            values = [one["logprob"] for one in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            best = {key: entry[key] for key in ("token", "logprob", "bytes")}
            assert entry["top_logprobs"][:1] == [best][:top]  # temperature 0


def test_logprobs_of_a_completion(mock: InProcessServer) -> None:
    body = {"prompt": "hello", "max_tokens": 15, "ignore_eos": True}
    text = ask(mock.url, COMPLETIONS, **body).choices[0].text
    assert "\ufffd" not in text, "tokens join to this text only if it has whole characters"
    for top in (0, 1, 5):
        logprobs = ask(mock.url, COMPLETIONS, logprobs=top, **body).choices[0].logprobs
        assert "".join(logprobs["tokens"]) == text
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
            assert text.startswith(token, offset)
        if not top:
            assert logprobs["top_logprobs"] is None
            continue
        for entry, token, value in zip(
            logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"]
        ):
            assert next(iter(entry.items())) == (token, value)  # temperature 0
            assert len(entry) == top


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_final_stop_token_has_no_logprobs_but_others_have(
    mock: InProcessServer, path: str
) -> None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    body: dict[str, Any] = {**prompt, "max_tokens": 12, "ignore_eos": True}
    body |= {"logprobs": True if path == CHAT else 0, "return_token_ids": True}
    known = ask(mock.url, path, **body).choices[0]
    ended = ask_both_ways(mock.url, path, stop_token_ids=[known.token_ids[4]], **body).choices[0]
    assert ended.token_ids == known.token_ids[:5]
    assert count_of(ended.logprobs) == 4
    # The tokens of a stop string were generated like any other.
    stop = known.text[6:8]
    cut = ask_both_ways(mock.url, path, stop=stop, **body).choices[0]
    assert cut.finish_reason == "stop"
    assert count_of(cut.logprobs) == len(cut.token_ids) < 12


@pytest.mark.slow
def test_an_ignored_end_of_sequence_is_a_token_like_any_other(mock: InProcessServer) -> None:
    found = 0
    for seed in range(20):
        body = drawn(seed, prompt="hello", ignore_eos=True, logprobs=0, return_token_ids=True)
        choice = ask_both_ways(mock.url, COMPLETIONS, **body).choices[0]
        assert count_of(choice.logprobs) == len(choice.token_ids)
        found += EOS in choice.token_ids
    assert found


def count_of(logprobs: Any) -> int:
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])
