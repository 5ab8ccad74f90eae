"""Triton's generate extension in this server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser.server.kserve.fields import Fields
from glm_multiuser.server.kserve.generate import GenerateRequest
from tests.server.asking import answer_alone, events_of, long_prompts, post
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.kserve_asking import PATH, answer_to, compact, refusal


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """One with room for every test here."""
    with in_process_server(mock_settings(users=4, max_queue=64)) as server:
        yield server


def test_the_generic_form_gets_the_generic_output(server: InProcessServer) -> None:
    answer = post(server, f"{PATH}/generate", {"text_input": "hello", "id": "7"}).json()
    assert answer == {
        "id": "7",
        "model_name": MODEL,
        "model_version": "1",
        "response": answer_alone("hello"),
        "text_output": answer_alone("hello"),
        "history": compact([["hello", answer_alone("hello")]]),
    }


def test_the_named_form_gets_the_named_outputs_only(server: InProcessServer) -> None:
    answer = post(server, f"{PATH}/generate", {"prompt": "hello"}).json()
    assert set(answer) == {"model_name", "model_version", "response", "history"}


@pytest.mark.parametrize("name", ["prompt", "text_input"])
def test_a_stream_ends_with_history_and_finish_reason(server: InProcessServer, name: str) -> None:
    prompt = long_prompts(1)[0]
    body = {name: prompt, "id": "7", "history": '[["a","b"]]', "max_token": 9}
    reply = post(server, f"{PATH}/generate_stream", body)
    *pieces, last = events_of(reply.text)
    expected = answer_to(prompt, [["a", "b"]], max_tokens=9)
    assert len(pieces) > 1
    outputs = {"response"} if name == "prompt" else {"response", "text_output"}
    for piece in pieces:
        assert set(piece) == {"id", "model_name", "model_version", *outputs}
    for output in outputs:
        assert "".join(piece[output] for piece in [*pieces, last]) == expected
    assert json.loads(last["history"]) == [["a", "b"], [prompt, expected]]
    assert last["finish_reason"] == "length"
    assert reply.text.isascii()


def test_null_is_the_default(server: InProcessServer) -> None:
    fields = dict.fromkeys(set(GenerateRequest.model_fields) - {"prompt"})
    for parameters in (None, dict.fromkeys(Fields.model_fields.keys() - {"prompt"})):
        body = {**fields, "prompt": "hello", "parameters": parameters}
        answer = post(server, f"{PATH}/generate", body).json()
        assert answer["response"] == answer_alone("hello")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "sequence_id: Input should be a number, not True"),
        ([], "sequence_id: Input should be a valid integer, not []"),
    ],
)
def test_errors_name_fields_without_the_types_of_a_union(
    server: InProcessServer, value: Any, message: str
) -> None:
    assert refusal(server, {"prompt": "a", "sequence_id": value}, "generate") == (400, message)


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "text_input": "b"},
        {"prompt": "a", "parameters": {"text_input": "b"}},
        {"history": "[]"},
    ],
)
def test_one_question_must_be_given(server: InProcessServer, path: str, body: Any) -> None:
    assert refusal(server, body, path) == (400, "prompt or text_input must be given, one of them")
