"""The history of an inference: which rounds count, and how it is returned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser.tokenizers import rounds_of
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.kserve_asking import answer_to, column, infer, refusal


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """One with room for every test here."""
    with in_process_server(mock_settings(users=4, max_queue=64)) as server:
        yield server


ROUNDS = [["a", "b"], ["c", "d"], ["e", "f"]]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 32767])
def test_only_the_last_rounds_count_and_all_come_back(server: InProcessServer, count: int) -> None:
    outputs = infer(
        server,
        column("prompt", "q"),
        column("history", json.dumps(ROUNDS)),
        column("history_len", count, datatype="INT16"),
    )
    expected = answer_to("q", ROUNDS[len(ROUNDS) - count :] if count < 3 else ROUNDS)
    assert outputs["response"] == [expected]
    assert json.loads(outputs["history"][0]) == [*ROUNDS, ["q", expected]]


@pytest.mark.parametrize(("count", "first"), [(None, 1), (2, 1), (1, 3), (0, 5)])
def test_messages_are_a_history_whose_system_text_always_counts(
    server: InProcessServer, count: Any, first: int
) -> None:
    inputs = [column("prompt", "q"), column("history", json.dumps(MESSAGES))]
    if count is not None:
        inputs.append(column("history_len", count, datatype="INT16"))
    outputs = infer(server, *inputs)
    expected = answer_to("q", [MESSAGES[0], *MESSAGES[first:]])
    assert outputs["response"] == [expected]
    added = [{"role": "user", "content": "q"}, {"role": "assistant", "content": expected}]
    assert json.loads(outputs["history"][0]) == [*MESSAGES, *added]


def test_a_history_is_readable_and_compact(server: InProcessServer) -> None:
    outputs = infer(server, column("prompt", "你\u2028"), column("history", '[ [ "好", "" ] ]'))
    answer = json.dumps(outputs["response"][0], ensure_ascii=False)
    assert outputs["history"] == [f'[["好",""],["你\u2028",{answer}]]']


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ('[["a", "b"], ["c"]]', "item 1 is no [question, answer] pair and no message"),
        ('[{"role": "robot", "content": ""}]', "item 0 is no [question, answer] pair"),
        ("[['a', 'b']]", "Invalid JSON"),
        ('[["\\ud800", "b"]]', "Invalid JSON"),
        ("[" * 10_000, "Invalid JSON"),
        ('"text"', "valid array"),
        (json.dumps([["a", "b"]] * 1025), "at most 1024 items"),
        ('[{"role": "user", "content": "a"}]', "history[0] is a user message without an answer"),
    ],
)
def test_a_history_that_is_none_is_named(
    server: InProcessServer, history: str, problem: str
) -> None:
    body = {"inputs": [column("prompt", "q"), column("history", history)]}
    status, error = refusal(server, body)
    assert (status, error[:7]) == (400, "history")
    assert problem in error
    assert len(error) < 400


def test_rounds_of_a_message_history_are_what_the_tokenizer_reads() -> None:
    """Guards the tests above: the mock's prompt differs for every history that they compare."""
    assert rounds_of(MESSAGES) == ("s", [("a", "b"), ("c", "d")])
    answers = {answer_to("q", history) for history in (ROUNDS, ROUNDS[1:], ROUNDS[2:], [])}
    assert len(answers) == 4
