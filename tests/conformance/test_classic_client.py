"""Clients that post raw JSON from many threads, with a header whose name is misspelt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest

from tests.conformance.asking import (
    PATIENCE,
    QUESTIONS,
    Answer,
    Target,
    ask,
    json_answers,
    json_request,
    send,
)


def by_http_client(target: Target, question: str) -> Answer:
    """Without any Content-Type."""
    headers = {"Content_Type": "application/json"}
    reply = send(target, target.path("infer"), json_request([question]), headers)
    assert reply.status == 200, reply.body
    return json_answers(reply.json())[0]


def by_urllib(target: Target, question: str) -> Answer:
    """urllib adds the Content-Type of a web form."""
    request = Request(
        target.url + target.path("infer"),
        json.dumps(json_request([question])).encode(),
        {"Content_Type": "application/json"},
    )
    with urlopen(request, timeout=PATIENCE) as response:
        return json_answers(json.load(response))[0]


@pytest.fixture(scope="module")
def alone(target: Target) -> list[Answer]:
    return [ask(target, [question])[0] for question in QUESTIONS]


@pytest.mark.parametrize("one_request", [by_http_client, by_urllib])
def test_ten_requests_from_four_threads(
    target: Target, alone: list[Answer], one_request: object
) -> None:
    assert callable(one_request)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda question: one_request(target, question), QUESTIONS))
    assert together == alone
    assert [answer.history[-1][0] for answer in together] == list(QUESTIONS)
