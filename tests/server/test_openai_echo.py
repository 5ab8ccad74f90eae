"""`echo` in completions: the prompt before the answer, and the log-probabilities of its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any

import numpy as np
import openai
import pytest

from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.mixed_runner import MixedRunner
from tests.engine.mock_runner import EOS, hashed_logits, written
from tests.server.asking import HTTP
from tests.server.in_process import (
    MODEL,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
)
from tests.server.openai_reading import COMPLETIONS, ask, ask_both_ways, sync_client

SETTINGS = mock_settings(users=4, max_queue=64)
PROMPT = [3, 14, 15, 9, 26, 35, 8, 9, 7, 9, 3, 2, 40]
"""None of its tokens is a part of a character or adds a text that others change."""


@pytest.fixture(scope="module")
def mock() -> Iterator[InProcessServer]:
    causal = partial(mock_llm, chunk=5, runner_class=MixedRunner)
    with in_process_server(SETTINGS, causal) as server:
        yield server


@pytest.fixture(scope="module")
def client(mock: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(mock.url) as client:
        yield client


def log_softmax(token_ids: Sequence[int]) -> Any:
    """Of what follows these tokens."""
    logits = hashed_logits(written(token_ids)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def known(token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens from the second one on."""
    return [float(log_softmax(token_ids[:at])[token_ids[at]]) for at in range(1, len(token_ids))]


def likeliest(token_ids: Sequence[int]) -> int:
    return int(log_softmax(token_ids).argmax())


def parse_logprobs(outputs: Any, ctxlens: Sequence[int]) -> list[tuple[float, bool]]:
    """As lm-evaluation-harness reads log-likelihoods of continuations behind their contexts."""
    res = []
    for choice, ctxlen in zip(sorted(outputs["choices"], key=itemgetter("index")), ctxlens):
        assert ctxlen > 0
        tokens_logprobs = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        is_greedy = all(tok == max(top.values()) for tok, top in zip(tokens_logprobs, top_logprobs))
        res.append((sum(tokens_logprobs), is_greedy))
    return res


def harness_body(prompts: Any) -> dict[str, Any]:
    """What lm-evaluation-harness sends for log-likelihoods."""
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return {"model": MODEL, "prompt": prompts, **fields}


def ends_at_once() -> list[int]:
    """A prompt behind which the answer ends."""
    return next([7, 8, one, 9] for one in count(1) if likeliest([7, 8, one, 9]) == EOS)


def test_log_likelihoods_of_the_harness(mock: InProcessServer) -> None:
    context = [5, 6, 7]
    greedy = list(context)
    for _ in range(4):
        greedy.append(likeliest(greedy))
    assert EOS not in greedy
    prompts = [[*context, 1, 2, 3], greedy, ends_at_once(), PROMPT]
    ctxlens = [3, 3, 2, 12]
    response = HTTP.post(mock.url + COMPLETIONS, json=harness_body(prompts))
    assert response.status_code == 200, response.text
    outputs = response.json()
    found = parse_logprobs(outputs, ctxlens)
    for (logprob, _), prompt, ctxlen in zip(found, prompts, ctxlens):
        assert logprob == pytest.approx(sum(known(prompt)[ctxlen - 1 :]), abs=1e-5)
    assert [is_greedy for _, is_greedy in found] == [False, True, False, False]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in outputs["choices"]]
    # The token of the answer is there even if it only ends it.
    assert lengths == [len(prompt) + 1 for prompt in prompts]
    assert outputs["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_all_of_them_at_once_as_one_by_one(mock: InProcessServer) -> None:
    prompts = [[1 + (seed * place) % 40 for place in range(1, 5 + seed)] for seed in range(1, 21)]
    with ThreadPoolExecutor(8) as threads:
        bodies = [harness_body([prompt]) for prompt in prompts]
        together = list(threads.map(lambda body: ask(mock.url, COMPLETIONS, **body), bodies))
    for answer, body in zip(together, bodies):
        assert answer == ask(mock.url, COMPLETIONS, **body)


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_the_prompt_and_the_answer_have_one_list(
    mock: InProcessServer, top: int, max_tokens: int
) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    answer = ask_both_ways(
        mock.url, COMPLETIONS, echo=True, logprobs=top, return_token_ids=True, **body
    )
    choice, usage = answer.choices[0], answer.usage
    assert len(choice.token_ids) == max_tokens
    whole = [*PROMPT, *choice.token_ids]
    logprobs = choice.logprobs
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(known(whole), abs=1e-5)
    assert "".join(logprobs["tokens"]) == choice.text
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"]):
        assert choice.text.startswith(token, offset)
    assert choice.text.startswith(FakeTokenizer().decode(PROMPT))
    assert choice.finish_reason == "length"
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), max_tokens)
    assert usage["total_tokens"] == len(PROMPT) + max_tokens
    if not top:
        assert logprobs["top_logprobs"] is None
        return
    first, *others = logprobs["top_logprobs"]
    assert first is None
    for one, token, value in zip(others, logprobs["tokens"][1:], logprobs["token_logprobs"][1:]):
        assert one[token] == value
        assert top <= len(one) <= top + 1


def test_with_the_official_client(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 2}
    (choice,) = client.completions.create(**fields, max_tokens=0).choices
    assert choice.text == FakeTokenizer().decode(PROMPT)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(known(PROMPT), abs=1e-5)
    chunks = list(client.completions.create(**fields, max_tokens=0, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert chunks[0].choices[0].text == choice.text
    assert chunks[0].choices[0].logprobs == choice.logprobs


def test_answers_are_those_without_it(mock: InProcessServer) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, PROMPT[:4]], "n": 2, "seed": 4, "temperature": 3.0}
    body |= {"max_tokens": 7, "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    plain, echo = (ask_both_ways(mock.url, COMPLETIONS, **body, echo=one) for one in (False, True))
    assert list(plain.choices) == list(echo.choices) == [0, 1, 2, 3]
    assert plain.usage == echo.usage
    for number, prompt in enumerate((PROMPT, PROMPT, PROMPT[:4], PROMPT[:4])):
        one, other = plain.choices[number], echo.choices[number]
        text = FakeTokenizer().decode(prompt)
        assert other.text == text + one.text
        assert other.token_ids == one.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert other.logprobs[name][len(prompt) :] == one.logprobs[name]
        moved = [len(text) + offset for offset in one.logprobs["text_offset"]]
        assert other.logprobs["text_offset"][len(prompt) :] == moved


def test_the_best_of_several(mock: InProcessServer) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "seed": 4, "temperature": 3.0, "max_tokens": 7}
    best = ask(mock.url, COMPLETIONS, **body, best_of=3, echo=True, logprobs=1).choices
    plain = ask(mock.url, COMPLETIONS, **body, best_of=3).choices
    assert best[0].text == FakeTokenizer().decode(PROMPT) + plain[0].text


def test_a_text_is_its_tokens_alone(mock: InProcessServer) -> None:
    """As `/tokenize` gives them: the form of the chat would be tokens that nobody sent."""
    text = "hello"
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 3, "ignore_eos": True}
    token_ids = FakeTokenizer().encode(text)
    of_text = ask_both_ways(mock.url, COMPLETIONS, prompt=[text, text], **fields)
    of_ids = ask_both_ways(mock.url, COMPLETIONS, prompt=[token_ids, token_ids], **fields)
    assert of_text == of_ids


def test_a_text_that_has_no_tokens(mock: InProcessServer) -> None:
    body = {"model": MODEL, "echo": True, "logprobs": 1}
    for text in ('"\\ud800"', '""'):
        content = json.dumps(body)[:-1] + f', "prompt": {text}}}'
        response = HTTP.post(mock.url + COMPLETIONS, content=content)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["hello", PROMPT])
def test_the_prompt_alone_without_logprobs(mock: InProcessServer, prompt: Any) -> None:
    answer = ask_both_ways(mock.url, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0)
    text = prompt if isinstance(prompt, str) else FakeTokenizer().decode(prompt)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 0


def test_a_prompt_of_one_token(mock: InProcessServer) -> None:
    choice = ask_both_ways(
        mock.url, COMPLETIONS, prompt=[3], echo=True, logprobs=1, max_tokens=0
    ).choices[0]
    assert choice.logprobs["token_logprobs"] == choice.logprobs["top_logprobs"] == [None]
    assert choice.logprobs["text_offset"] == [0]


def test_no_answer_needs_an_echo(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0; without echo") as error:
        client.completions.create(model=MODEL, prompt="hello", max_tokens=0)
    assert (error.value.param, error.value.code) == ("max_tokens", "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_see_themselves_in_both_directions_have_none(stream: bool) -> None:
    with in_process_server(SETTINGS) as server, sync_client(server.url) as client:
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "stream": stream}
        with pytest.raises(openai.BadRequestError, match="echo with logprobs: ") as error:
            client.completions.create(model=MODEL, prompt=PROMPT, **fields)
        assert (error.value.param, error.value.code) == ("echo", "invalid_value")


def test_too_many_prompts_are_rejected_before_they_are_read(
    mock: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    async def text_token_ids(_: object, text: str, field: str) -> list[int]:
        read.append(text)
        return [1]

    monkeypatch.setattr("glm_multiuser.server.openai.echo.text_token_ids", text_token_ids)
    body = {"model": MODEL, "prompt": ["a"] * 1000, "echo": True, "logprobs": 1, "max_tokens": 1}
    response = HTTP.post(f"{mock.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert "1000 answers; one request may ask for" in response.json()["error"]["message"]
    assert not read
