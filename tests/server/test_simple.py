"""The simple API: one question, one answer, whole or as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.server.simple import SimpleRequest
from glm_multiuser.tokenizers import IncrementalDetokenizer
from tests.api.fake_tokenizer import PIECES, FakeTokenizer
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    HTTP,
    answer_alone,
    ask,
    events_of,
    in_background,
    is_idle,
    long_prompts,
    nothing_stays,
    streamed_text,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)

AWKWARD = [
    "\n",
    "\r\n",
    "\n\n",
    "\r",
    "\t",
    '"',
    "'",
    "\\",
    "\\n",
    "\u2028",
    "\u2029",
    "\x85",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x00",
    "\x7f",
    "\ufeff",
    "😀",
    "👨‍👩‍👧",
    "é",
    "data: ",
    "\ndata: {}\n\n",
    "</script>",
    "[DONE]",
]
"""What a careless reader or writer of event streams or JSON would stumble over."""


class AwkwardTokenizer(FakeTokenizer):
    """Whose tokens say the awkward texts; the emoji comes byte by byte."""

    pieces: ClassVar[dict[int, bytes]] = {
        **PIECES,
        **{7 + number: text.encode() for number, text in enumerate(AWKWARD)},
        **{number: bytes([byte]) for number, byte in zip((33, 34, 35, 36), "😀".encode())},
    }

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def detokenizer(
        self, *, continued: bool = False, exact: bool = False
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.token_bytes)


def awkward_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    llm = mock_llm(settings, **options)
    llm.tokenizer = AwkwardTokenizer()
    return llm


@pytest.fixture(scope="module")
def shared() -> Iterator[InProcessServer]:
    """For tests that leave it as it was."""
    with in_process_server() as server:
        yield server


def post_bytes(server: InProcessServer, content: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = HTTP.build_request("POST", server.url, content=content, headers=named)
    return HTTP.send(request)


def test_the_answer_and_the_conversation_come_back(shared: InProcessServer) -> None:
    response = ask(shared, "ab")
    answer = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", answer.pop("time"))
    assert answer == {
        "response": answer_alone("ab"),
        "history": [["ab", answer_alone("ab")]],
        "status": 200,
        "finish_reason": "length",
    }


def test_history_as_pairs_and_as_messages_is_the_same_conversation(shared: InProcessServer) -> None:
    pairs = [["first", "one"], ["second", "two"]]
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "two"},
    ]
    by_pairs = ask(shared, "third", history=pairs, max_tokens=5).json()
    by_messages = ask(shared, "third", history=messages, max_tokens=5).json()
    text = by_pairs["response"]
    assert by_messages["response"] == text
    assert by_pairs["history"] == [*pairs, ["third", text]]
    assert by_messages["history"] == [
        *messages,
        {"role": "user", "content": "third"},
        {"role": "assistant", "content": text},
    ]
    assert text != ask(shared, "third", max_tokens=5).json()["response"]
    # What came back is a history for the next question.
    assert ask(shared, "4th", history=by_messages["history"]).status_code == 200


def test_a_system_message_counts(shared: InProcessServer) -> None:
    system = [{"role": "system", "content": "be kind"}]
    answer = ask(shared, "ab", history=system).json()
    assert answer["response"] != answer_alone("ab")
    assert [message["role"] for message in answer["history"]] == ["system", "user", "assistant"]


def test_a_stream_has_the_same_text_and_ends_with_the_whole(shared: InProcessServer) -> None:
    for prompt in ("ab", "你好", long_prompts(1)[0]):
        whole = ask(shared, prompt).json()
        response = ask(shared, prompt, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        events = events_of(response.text)
        assert streamed_text(response.text) == whole["response"]
        assert {**events[-1], "time": ""} == {
            **whole,
            "time": "",
            "delta": events[-1]["delta"],
        }
        assert all(set(event) == {"delta"} and event["delta"] for event in events[:-1])
        assert len(events) > 2


def parsed_like_a_browser(content: bytes) -> list[str]:
    """The data of an event stream, read as WHATWG's HTML standard says (9.2.6)."""
    events: list[str] = []
    data: list[str] = []
    for line in re.split("\r\n|\n|\r", content.decode("utf-8")):
        if not line and data:
            events.append("\n".join(data))
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    return events


def parsed_by_splitlines(content: bytes) -> list[str]:
    """As readers do that split wherever Unicode ends a line."""
    return [line[6:] for line in content.decode("utf-8").splitlines() if line.startswith("data: ")]


@pytest.mark.slow
@pytest.mark.parametrize("parse", [parsed_like_a_browser, parsed_by_splitlines])
def test_no_character_of_an_answer_breaks_a_stream(parse: Any) -> None:
    seen = ""
    with in_process_server(open_llm=awkward_llm) as server:
        for prompt in long_prompts(12):
            whole = ask(server, prompt).json()["response"]
            streamed = ask(server, prompt, stream=True).content
            deltas = [json.loads(data)["delta"] for data in parse(streamed)]
            assert "".join(deltas) == whole
            assert json.loads(parse(streamed)[-1])["response"] == whole
            seen += whole
    assert [text for text in AWKWARD if text not in seen] == []


@pytest.mark.slow
@pytest.mark.parametrize("text", AWKWARD)
def test_every_character_of_a_question_arrives(shared: InProcessServer, text: str) -> None:
    for prompt in (text, f"a{text}b"):
        expected = answer_alone(prompt)
        assert ask(shared, prompt).json()["response"] == expected
        escaped = json.dumps({"prompt": prompt}, ensure_ascii=True).encode()
        plain = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
        for content in (escaped, plain):
            assert post_bytes(shared, content).json()["response"] == expected


@pytest.mark.parametrize(
    ("max_length", "max_tokens", "generated"),
    [(None, 3, 3), (13, None, 3), (20, 4, 4), (11, 4, 1)],
)
def test_an_answer_has_so_many_tokens_at_most(
    shared: InProcessServer, max_length: Any, max_tokens: Any, generated: int
) -> None:
    prompt = "questions"
    assert len(FakeTokenizer().encode_prompt(prompt)) == 10
    before = shared.llm().stats().tokens_generated
    answer = ask(shared, prompt, max_length=max_length, max_tokens=max_tokens).json()
    assert answer["finish_reason"] == "length"
    assert shared.llm().stats().tokens_generated - before == generated


def test_a_question_that_leaves_no_room_for_an_answer(shared: InProcessServer) -> None:
    response = ask(shared, "abcdefgh", max_length=9)
    assert response.status_code == 400
    assert response.json() == {
        "error": "max_length is 9; the prompt alone has 9 tokens",
        "code": "context_length_exceeded",
    }
    assert ask(shared, "abcdefgh", max_length=10).status_code == 200
    too_long = ask(shared, "a" * 95)
    assert too_long.status_code == 400
    assert "prompt has 96 tokens; with seq_length 96" in too_long.json()["error"]


def test_a_seed_makes_sampling_repeatable(shared: InProcessServer) -> None:
    def sampled(seed: int) -> str:
        fields = {"temperature": 2.0, "top_p": 0.9, "seed": seed}
        return str(ask(shared, "ab", **fields).json()["response"])

    assert sampled(1) == sampled(1) != sampled(2)


def test_who_finds_it_full_is_told_at_once(shared: InProcessServer) -> None:
    with in_process_server(mock_settings(users=1, max_queue=0)) as server, nothing_stays(server):
        with SingleSteps():
            running = in_background(ask, server, "ab")
            wait_until(lambda: server.service.running == 1)
            response = ask(server, "ab")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert running.result(PATIENCE).status_code == 200


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": None}, "prompt: Input should be a valid string, not None"),
        ({"prompt": ["a"]}, "prompt: Input should be a valid string, not ['a']"),
        ({"stream": "perhaps"}, "stream: Input should be a valid boolean"),
        ({"max_length": 0}, "max_length: Input should be greater than or equal to 1, not 0"),
        ({"max_length": 1.5}, "max_length: Input should be a valid integer"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1, not -1"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, not -1"),
        ({"temperature": 101}, "temperature: Input should be less than or equal to 100, not 101"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"top_p": 0}, "top_p: Input should be greater than 0, not 0"),
        ({"top_p": 2}, "top_p: Input should be less than or equal to 1, not 2"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, not -1"),
        ({"seed": 2**63}, "seed: Input should be less than 9223372036854775808, not 9223372"),
        ({"history": "ab"}, "history: Input should be a valid list, not 'ab'"),
        ({"seed": True}, "seed: Input should be a number, not True"),
        ({"history": [["a", "b", "c"]]}, "history.0: Tuple should have at most 2 items"),
        ({"history": [["a", 1]]}, "history.0.1: Input should be a valid string, not 1"),
        (
            {"history": [{"role": "tool", "content": "a"}]},
            "history.0.role: Input should be 'system', 'user' or 'assistant', not 'tool'",
        ),
        (
            {"history": [{"role": "user", "content": 1}]},
            "history.0.content: Input should be a valid string, not 1",
        ),
        ({"history": [{"role": "user"}]}, "history.0.content: Field required"),
        (
            {"history": [["a", "b"], "c"]},
            "history.1: must be a [question, answer] pair or a message, not 'c'",
        ),
        ({"history": [["a", "b"]] * 1025}, "history: List should have at most 1024 items"),
        ({"history": [{"role": "user", "content": "a"}]}, "history[0] is a user message without"),
        ({"model": 3}, "model: Input should be a valid string, not 3"),
    ],
)
def test_a_field_that_cannot_be(shared: InProcessServer, fields: Any, told: str) -> None:
    response = ask(shared, **{"prompt": "ab", **fields})
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_value"
    assert response.json()["error"].startswith(told)
    assert len(response.json()["error"]) < 300
    assert is_idle(shared)


def test_null_is_the_default(shared: InProcessServer) -> None:
    fields = dict.fromkeys(set(SimpleRequest.model_fields) - {"prompt"})
    assert ask(shared, "ab", **fields).json()["response"] == answer_alone("ab")


def test_a_model_that_is_not_there(shared: InProcessServer) -> None:
    response = ask(shared, "ab", model="nobody")
    assert response.status_code == 404
    assert response.json() == {
        "error": "model 'nobody' is unknown; this server has mock",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ab",
        b"{",
        b'{"prompt": "ab"',
        b'{"prompt": "ab"} and more',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"ab"',
    ],
)
def test_a_body_that_is_no_object_of_json(shared: InProcessServer, content: bytes) -> None:
    response = post_bytes(shared, content)
    assert response.status_code == 400
    assert set(response.json()) == {"error", "code"}
    assert ask(shared, "ab").status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "no/"])
def test_the_content_type_does_not_matter(shared: InProcessServer, kind: Any) -> None:
    content = json.dumps({"prompt": "ab"}).encode()
    response = post_bytes(shared, content, **({} if kind is None else {"content_type": kind}))
    assert response.json()["response"] == answer_alone("ab")
