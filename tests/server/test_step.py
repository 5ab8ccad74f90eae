"""The step API: however a client polls, it gets the whole text exactly once."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glm_multiuser import SamplingParams
from glm_multiuser.server import step as step_api
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.settings import Limits, ModelSettings
from tests.api.fake_tokenizer import PIECES
from tests.engine.mock_runner import EOS
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    BLUE,
    FAILS,
    KEYS,
    RED,
    answer_alone,
    ask,
    in_background,
    is_idle,
    llm_that_fails,
    long_prompts,
    nothing_stays,
    post,
    step,
    step_to_end,
    tokens_alone,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)

ids = (f"id {number}" for number in itertools.count())
"""Names that were never used."""


@pytest.fixture(scope="module")
def shared() -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    with in_process_server() as server:
        yield server


def is_inside_character(token_ids: Sequence[int]) -> bool:
    """Whether the bytes of these tokens stop before the end of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(PIECES[token] for token in token_ids))
    return decoder.getstate()[0] != b""


def polled(server: InProcessServer, prompt: str, patterns: Iterator[int]) -> list[dict[str, Any]]:
    """The answers to calls before each of which the engine makes so many steps."""
    answers: list[dict[str, Any]] = []
    cache_id = next(ids)
    with SingleSteps() as steps:
        before = server.service.requests
        first = in_background(step, server, cache_id, prompt)
        wait_until(lambda: server.service.requests > before or first.done())
        steps.step()
        answers.append(first.result(PATIENCE).json())
        while answers[-1]["flag"] != "end":
            for _ in range(next(patterns)):
                steps.step()
            answers.append(step(server, cache_id).json())
    return answers


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    prompt=st.text("abcdefghijklmnop ", min_size=1, max_size=30),
    pattern=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_polls_of_any_pattern_get_the_whole_text_with_the_right_flags(
    shared: InProcessServer, prompt: str, pattern: list[int]
) -> None:
    tokens = tokens_alone(prompt)
    # The first call waits while its step is made: it may answer between a token and the end.
    assume(len(tokens) > 1)
    answers = polled(shared, prompt, itertools.cycle(pattern))
    assert "".join(answer["delta_text"] for answer in answers) == answer_alone(prompt)
    seen = itertools.accumulate(itertools.chain([1], itertools.cycle(pattern)))
    counts = list(itertools.islice(seen, len(answers)))
    assert counts[-1] >= len(tokens) > (counts[-2] if len(counts) > 1 else 0)
    *flags, last = [answer["flag"] for answer in answers]
    assert last == "end"
    assert flags == [
        "hang" if is_inside_character(tokens[:count]) else "sending" for count in counts[:-1]
    ]


@pytest.mark.slow
def test_a_text_that_stops_inside_a_character_is_told_apart() -> None:
    prompt = next(one for one in long_prompts(40) if 4 in tokens_alone(one)[1:-1])
    tokens = tokens_alone(prompt)
    with in_process_server() as server:
        answers = polled(server, prompt, itertools.repeat(1))
    place = tokens.index(4, 1)
    assert [answer["flag"] for answer in answers[place - 1 : place + 1]] == ["sending", "hang"]
    assert len(answers) == len(tokens)


def test_the_text_is_that_of_the_simple_api(shared: InProcessServer) -> None:
    for prompt in ("ab", "你好", "a longer question", long_prompts(1)[0]):
        whole = ask(shared, prompt).json()["response"]
        assert step_to_end(shared, next(ids), prompt) == whole == answer_alone(prompt)


def test_earlier_rounds_and_the_length_count(shared: InProcessServer) -> None:
    fields = {"history": [["a", "b"], ["c", "d"]], "max_length": 40}
    whole = ask(shared, "ab", **fields).json()
    assert whole["finish_reason"] == "length"
    assert step_to_end(shared, next(ids), "ab", **fields) == whole["response"]
    assert whole["response"] != ask(shared, "ab", max_length=40).json()["response"]


def test_do_sample_false_is_greedy_whatever_else_is_wanted() -> None:
    def warm_llm(settings: ModelSettings, **options: Any) -> Any:
        params = SamplingParams(temperature=50.0, max_tokens=64)
        return mock_llm(settings, params=params, **options)

    (prompt,) = long_prompts(1)
    with in_process_server(open_llm=warm_llm) as server:
        greedy = [
            step_to_end(server, next(ids), prompt, do_sample=False, temperature=9.0),
            step_to_end(server, next(ids), prompt, temperature=0),
        ]
        sampled = [
            step_to_end(server, next(ids), prompt),
            step_to_end(server, next(ids), prompt, do_sample=True),
        ]
    assert greedy == [answer_alone(prompt)] * 2
    assert answer_alone(prompt) not in sampled


def test_a_generation_that_has_ended_is_over(shared: InProcessServer) -> None:
    cache_id = next(ids)
    step_to_end(shared, cache_id, "ab")
    before = shared.service.requests
    for _ in range(2):
        response = step(shared, cache_id, "ab")
        assert response.status_code == 409
        assert response.json() == {
            "error": f"cache_id {cache_id!r} has finished; take a new one",
            "code": "finished",
        }
    assert shared.service.requests == before
    assert is_idle(shared)


def test_two_calls_at_once_for_one_generation(shared: InProcessServer) -> None:
    cache_id = next(ids)
    with SingleSteps() as steps:
        first = in_background(step, shared, cache_id, "ab")
        wait_until(lambda: shared.service.running == 1)
        second = step(shared, cache_id, "ab")
        steps.step()  # and no other, so it has one token and not the end
        begun = first.result(PATIENCE).json()
    assert second.status_code == 409
    assert second.json()["code"] == "busy"
    assert begun["flag"] == "sending"
    assert begun["delta_text"] + step_to_end(shared, cache_id) == answer_alone("ab")


def test_a_call_does_not_wait_for_ever(
    shared: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_api, "WAIT_SECONDS", 0.01)
    cache_id = next(ids)
    with SingleSteps():
        for _ in range(3):
            nothing = step(shared, cache_id, "ab").json()
            assert nothing == {"flag": "sending", "delta_text": ""}
    assert step_to_end(shared, cache_id) == answer_alone("ab")


def test_who_does_not_come_back_is_given_up() -> None:
    limits = {"step_seconds": 0.01}
    (prompt,) = long_prompts(1)
    with in_process_server(mock_settings(limits=limits)) as server, nothing_stays(server):
        with SingleSteps() as steps:
            first = in_background(step, server, "an id", prompt)
            wait_until(lambda: server.service.running == 1)
            steps.step()
            assert first.result(PATIENCE).json()["flag"] == "sending"
            wait_until(lambda: is_idle(server))
            steps.step()
            steps.step()
            assert server.llm().stats().active_users == 0
        for _ in range(2):
            response = step(server, "an id")
            assert (response.status_code, response.json()["code"]) == (410, "expired")


def test_who_comes_back_in_time_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call may leave an old timer behind."""
    with in_process_server() as server, nothing_stays(server):
        timers: list[Any] = []
        call_later = server.loop.call_later

        def watched(delay: float, function: Any, *args: Any) -> Any:
            timer = call_later(delay, function, *args)
            if args[-1:] == ("expired",):
                timers.append(timer)
            return timer

        monkeypatch.setattr(server.loop, "call_later", watched)
        text, flag = "", ""
        while flag != "end":
            answer = step(server, "an id", "question 0").json()
            text, flag = text + answer["delta_text"], answer["flag"]
            assert sum(not timer.cancelled() for timer in timers) == (flag != "end")
        assert text == answer_alone("question 0")


def test_so_many_generations_at_the_same_time_and_no_more() -> None:
    limits = {"step_entries": 2, "step_seconds": 0.01}
    with in_process_server(mock_settings(limits=limits)) as server:
        with nothing_stays(server), SingleSteps():
            asked = []
            for number in range(2):
                asked.append(in_background(step, server, f"id {number}", "question 0"))
                server.wait_until_running(number + 1)
            response = step(server, "id 2", "ab")
        assert response.status_code == 429
        assert response.json()["code"] == "too_many_generations"
        assert "2 generations are open; step_entries is 2" in response.json()["error"]
        assert int(response.headers["retry-after"]) >= 1


def test_without_an_expiry_nobody_is_told_when_to_come_back() -> None:
    full = APIError(429, "too_many_generations", "full", retry_after=math.inf)
    assert "Retry-After" not in full.headers


def test_an_id_belongs_to_its_key() -> None:
    first, second = long_prompts(2)
    with in_process_server(mock_settings(keys=KEYS)) as server, nothing_stays(server):
        texts = {"red": "", "blue": ""}
        ended: set[str] = set()
        callers = {"red": (first, RED), "blue": (second, BLUE)}
        for name in itertools.cycle(callers):
            if name not in ended:
                query, headers = callers[name]
                body = {"cache_id": "an id", "query": query}
                answer = post(server, "/llm/generate", body, **headers).json()
                texts[name] += answer["delta_text"]
                ended |= {name} if answer["flag"] == "end" else set()
            if len(ended) == 2:
                break
        assert texts == {"red": answer_alone(first), "blue": answer_alone(second)}


def test_a_generation_that_fails_is_forgotten_and_one_that_never_started_too() -> None:
    with in_process_server(open_llm=llm_that_fails) as server, nothing_stays(server):
        answer: dict[str, Any] = {"flag": "sending"}
        while "flag" in answer:
            response = step(server, "fails", "ab" + FAILS)
            answer = response.json()
        assert response.status_code == 500
        assert answer["error"] == "the logits of this request are not finite"
        assert is_idle(server)
        assert step(server, "fails", "ab").status_code == 409
        assert step(server, "an id", "a" * 96).json()["code"] == "context_length_exceeded"
        assert step(server, "an id", "ab", model_name="nobody").status_code == 404
        assert is_idle(server)
        assert step_to_end(server, "an id", "ab") == answer_alone("ab")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cache_id": ""}, "cache_id: "),
        ({"cache_id": "x" * 129}, "cache_id: "),
        ({"cache_id": 7}, "cache_id: "),
        ({"query": None}, "query: "),
        ({"temperature": -0.1}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"top_p": 1.1}, "top_p: "),
        ({"max_length": 0}, "max_length: "),
        ({"do_sample": "perhaps"}, "do_sample: "),
        ({"history": [["a"]]}, "history.0."),
        ({"history": "ab"}, "history: "),
    ],
)
def test_a_field_that_cannot_be(shared: InProcessServer, fields: Any, told: str) -> None:
    response = post(shared, "/llm/generate", {"cache_id": next(ids), "query": "ab", **fields})
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_value"
    assert response.json()["error"].startswith(told)
    assert is_idle(shared)


def test_null_is_the_default(shared: InProcessServer) -> None:
    fields = dict.fromkeys(set(step_api.StepRequest.model_fields) - {"cache_id", "query"})
    assert step_to_end(shared, next(ids), "ab", **fields) == answer_alone("ab")


def test_a_generation_needs_a_name(shared: InProcessServer) -> None:
    response = post(shared, "/llm/generate", {"query": "ab"})
    assert response.status_code == 400
    assert response.json()["error"] == "cache_id: Field required"


def test_names_of_the_past_are_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_api, "REMEMBERED", 2)

    async def find_and_end() -> None:
        entries = step_api.Entries(Limits())
        names = [("key", f"id {number}") for number in range(3)]
        for name in names:
            entries.find(name)
            entries.end(name)
        for name in names[1:]:
            with pytest.raises(APIError, match="has finished"):
                entries.find(name)
        entries.find(names[0])
        assert len(entries) == 1

    asyncio.run(find_and_end())


def test_the_mock_says_half_characters() -> None:
    """Or the tests above would show nothing."""
    assert is_inside_character([1, 4])
    assert not is_inside_character([1, 4, 5])
    assert not is_inside_character([EOS])
