"""Inference behaviour that KServe v2 leaves open; the model is a mock.

`tests/conformance` tests the requirements of the protocol.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.asking import HTTP, answer_alone, get, long_prompts, post
from tests.server.in_process import InProcessServer, in_process_server, mock_settings
from tests.server.kserve_asking import HALF, PATH, answer_to, column, infer, refusal


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """One with room for every test here."""
    with in_process_server(mock_settings(users=4, max_queue=64)) as server:
        yield server


def test_a_prompt_alone_is_a_request(server: InProcessServer) -> None:
    outputs = infer(server, column("prompt", "hello"))
    assert outputs["response"] == [answer_alone("hello")]
    assert json.loads(outputs["history"][0]) == [["hello", answer_alone("hello")]]


@pytest.mark.parametrize("empty", ["", " ", "[]", "\n[ ]"])
def test_empty_texts_stand_for_nothing(server: InProcessServer, empty: str) -> None:
    number = "" if "[" in empty else empty
    outputs = infer(
        server,
        column("prompt", "hello"),
        column("history", empty),
        column("temperature", number),
        column("max_token", number),
    )
    assert outputs["response"] == [answer_alone("hello")]


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_without_batches_gets_the_shape_that_it_sent(
    server: InProcessServer, count: int
) -> None:
    prompts = [f"hello {number}" for number in range(count)]
    body = {"inputs": [column("prompt", *prompts, shape=[count])]}
    outputs = post(server, f"{PATH}/infer", body).json()["outputs"]
    assert [output["shape"] for output in outputs] == [[count], [count]]
    assert outputs[0]["data"] == [answer_alone(prompt) for prompt in prompts]


def test_a_batch_has_as_many_rows_as_the_configuration_says(server: InProcessServer) -> None:
    most = get(server, f"{PATH}/config").json()["max_batch_size"]
    assert len(infer(server, column("prompt", *["a"] * most))["response"]) == most
    body = {"inputs": [column("prompt", *["a"] * (most + 1))]}
    assert refusal(server, body) == (
        400,
        f"prompt has shape [{most + 1}, 1]; it must be [N, 1] or [N], N from 1 to {most}",
    )


def test_rows_have_parameters_of_their_own(server: InProcessServer) -> None:
    prompt = long_prompts(1)[0]
    outputs = infer(server, column("prompt", prompt, prompt), column("max_token", "2", "5"))
    assert outputs["response"] == [
        answer_to(prompt, max_tokens=2),
        answer_to(prompt, max_tokens=5),
    ]


def test_a_body_that_is_too_large_when_decompressed(server: InProcessServer) -> None:
    body = json.dumps({"inputs": [column("prompt", "x" * (1 << 20))]}).encode()
    headers = {"Content-Encoding": "deflate"}
    reply = HTTP.post(server.url + f"{PATH}/infer", content=zlib.compress(body), headers=headers)
    assert reply.status_code == 413
    assert "1048576" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("infer", {"inputs": [column("prompt", HALF)]}),
        ("infer", {"inputs": [column("prompt", "q")], "id": HALF}),
        ("generate", {"prompt": HALF}),
        ("generate", {"text_input": HALF}),
        ("generate", {"prompt": "q", "history": HALF}),
        ("generate", {"prompt": "q", "id": HALF}),
        ("generate", {"prompt": "q", "stop": [HALF]}),
        ("generate_stream", {"prompt": "q", "parameters": {"stop": HALF}}),
        ("trace/setting", {HALF: "x"}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(server: InProcessServer, path: str, body: Any) -> None:
    reply = HTTP.post(server.url + f"{PATH}/{path}", content=json.dumps(body))
    assert reply.status_code == 400
    assert reply.json()["error"]


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ({"name": "nonsense"}, "nonsense is no output; there are response, history"),
        ({"name": "history", "parameters": {"classification": 2}}, "no classification"),
        ({"name": "history", "parameters": {"shared_memory_region": "r"}}, "shared_memory_region"),
    ],
)
def test_an_output_that_cannot_be(server: InProcessServer, output: Any, problem: str) -> None:
    status, error = refusal(server, {"inputs": [column("prompt", "q")], "outputs": [output]})
    assert status == 400
    assert problem in error


def test_an_output_that_is_asked_for_twice(server: InProcessServer) -> None:
    body = {"inputs": [column("prompt", "q")], "outputs": [{"name": "history"}] * 2}
    assert "history is given twice" in refusal(server, body)[1]


@pytest.mark.parametrize("part", ["", "/config", "/stats", "/ready"])
def test_an_unknown_model_or_version_is_404(server: InProcessServer, part: str) -> None:
    assert get(server, f"/v2/models/other{part}").status_code == 404
    assert get(server, f"{PATH}/versions/2{part}").json()["code"] == "version_not_found"
