"""Inference: JSON and binary data in both directions, batches, and which outputs come."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferRequestedOutput

from tests.conformance.asking import (
    PATIENCE,
    QUESTIONS,
    Target,
    answers_of,
    ask,
    binary_request,
    client_input,
    client_inputs,
    client_outputs,
    json_answers,
    json_request,
    send,
    tensor,
    texts_of,
)

BOTH = pytest.mark.parametrize(
    ("binary_in", "binary_out"), list(product([True, False], repeat=2)), ids=str
)
TEXTS = [
    pytest.param("晚上睡不着应该怎么办", id="Chinese"),
    pytest.param("🙂👩‍👩‍👧 hi", id="emoji"),
    pytest.param("one\ntwo\r\n\tthree", id="line breaks"),
    pytest.param("a\u2028b\u2029c\u0085d", id="Unicode line ends"),
    pytest.param("\"quoted\" \\back 'single' \\u4f60", id="quotes"),
    pytest.param(" around ", id="spaces around"),
]


@BOTH
def test_json_and_binary_data_in_both_directions(
    client: InferenceServerClient, target: Target, binary_in: bool, binary_out: bool
) -> None:
    result = client.infer(
        target.model,
        client_inputs(QUESTIONS[:2], binary=binary_in),
        outputs=client_outputs(binary_out),
    )
    for name in ("response", "history"):
        assert ("data" in result.get_output(name)) is not binary_out
    assert answers_of(result) == ask(target, QUESTIONS[:2])


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_as_they_were_sent(
    client: InferenceServerClient, target: Target, text: str, binary_in: bool, binary_out: bool
) -> None:
    earlier = json.dumps([[text, text]], ensure_ascii=binary_out)
    result = client.infer(
        target.model,
        client_inputs([text], [earlier], binary_in),
        outputs=client_outputs(binary_out),
    )
    (answer,) = answers_of(result)
    assert answer.history == [[text, text], [text, answer.response]]


def test_an_empty_prompt_is_answered_or_refused(target: Target) -> None:
    reply = send(target, target.path("infer"), json_request([""]))
    if reply.status != 200:
        assert reply.error()
        return
    (answer,) = json_answers(reply.json())
    assert answer.history == [["", answer.response]]


def test_empty_texts_in_the_history_come_back(target: Target) -> None:
    (answer,) = ask(target, ["hello"], ['[["",""]]'])
    assert answer.history[0] == ["", ""]


@pytest.mark.parametrize("binary", [True, False])
def test_64_kilobytes_of_history_that_does_not_count(
    client: InferenceServerClient, target: Target, binary: bool
) -> None:
    long = "长" * 10_000 + "x" * 34_000
    inputs = client_inputs(["hello"], [json.dumps([[long, "ok"]])], binary)
    inputs.append(client_input("history_len", np.array([0], np.int16), binary))
    (answer,) = answers_of(client.infer(target.model, inputs, outputs=client_outputs(binary)))
    assert answer.history == [[long, "ok"], ["hello", answer.response]]
    assert answer.response == ask(target, ["hello"])[0].response


def test_a_prompt_of_64_kilobytes_is_answered_or_refused(target: Target) -> None:
    long = "x" * 65_536
    reply = send(target, target.path("infer"), json_request([long]))
    if reply.status != 200:
        assert reply.error()
        return
    (answer,) = json_answers(reply.json())
    assert answer.history == [[long, answer.response]]


def test_a_history_goes_back_in_as_it_came_out(target: Target) -> None:
    (first,) = ask(target, ["你好"])
    (second,) = ask(target, ["你是谁"], [json.dumps(first.history)])
    assert second.history == [["你好", first.response], ["你是谁", second.response]]


def test_the_last_rounds_count(target: Target) -> None:
    rounds = [["hello", "Hi!"], ["1+1=?", "2"]]
    request = json_request(["hello"], [json.dumps(rounds)])
    request["inputs"].append(tensor("history_len", [1], "INT16"))
    reply = send(target, target.path("infer"), request)
    assert reply.status == 200, reply.body
    (with_last,) = json_answers(reply.json())
    (only_last,) = ask(target, ["hello"], [json.dumps(rounds[1:])])
    assert with_last.response == only_last.response


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_of_a_batch_are_answered_as_if_alone(target: Target, count: int) -> None:
    batch = ask(target, QUESTIONS[:count])
    assert batch == [ask(target, [question])[0] for question in QUESTIONS[:count]]


def test_rows_of_a_batch_have_their_own_histories(target: Target) -> None:
    histories = ["[]", '[["hello","Hi!"]]', '[["你好","你好！"],["1+1=?","2"]]']
    batch = ask(target, QUESTIONS[:3], histories)
    for answer, history, question in zip(batch, histories, QUESTIONS):
        assert answer.history == [*json.loads(history), [question, answer.response]]


@pytest.mark.parametrize("name", ["response", "history"])
def test_only_the_requested_output_comes(
    client: InferenceServerClient, target: Target, name: str
) -> None:
    result = client.infer(
        target.model, client_inputs(["hello"]), outputs=[InferRequestedOutput(name)]
    )
    assert [one["name"] for one in result.get_response()["outputs"]] == [name]


def test_one_output_binary_and_one_as_json(client: InferenceServerClient, target: Target) -> None:
    outputs = [
        InferRequestedOutput("history", binary_data=True),
        InferRequestedOutput("response", binary_data=False),
    ]
    result = client.infer(target.model, client_inputs(["hello"]), outputs=outputs)
    assert "data" in result.get_output("response")
    assert "data" not in result.get_output("history")
    assert answers_of(result) == ask(target, ["hello"])


def test_all_outputs_binary_by_one_parameter(target: Target) -> None:
    request = json_request(["hello"])
    request["parameters"] = {"binary_data_output": True}
    reply = send(target, target.path("infer"), request)
    assert reply.status == 200
    length = int(reply.headers["inference-header-content-length"])
    head = json.loads(reply.body[:length])
    sizes = [one["parameters"]["binary_data_size"] for one in head["outputs"]]
    assert len(reply.body) == length + sum(sizes)


def test_binary_data_by_hand(target: Target) -> None:
    head, data = binary_request(texts_of(["hello"]))
    encoded = json.dumps(head).encode()
    reply = send(
        target,
        target.path("infer"),
        encoded + data,
        {"Inference-Header-Content-Length": str(len(encoded))},
    )
    assert reply.status == 200, reply.body
    assert json_answers(reply.json()) == ask(target, ["hello"])


def test_the_id_comes_back(client: InferenceServerClient, target: Target) -> None:
    result = client.infer(target.model, client_inputs(["hello"]), request_id="编号-7")
    assert result.get_response()["id"] == "编号-7"
    assert result.get_response()["model_name"] == target.model
    assert result.get_response()["model_version"] == "1"


def test_a_version_in_the_path(client: InferenceServerClient, target: Target) -> None:
    result = client.infer(target.model, client_inputs(["hello"]), model_version="1")
    assert answers_of(result) == ask(target, ["hello"])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: InferenceServerClient, target: Target, algorithm: str) -> None:
    result = client.infer(
        target.model,
        client_inputs(["hello"]),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert answers_of(result) == ask(target, ["hello"])


def test_requests_at_the_same_time(client: InferenceServerClient, target: Target) -> None:
    running = [
        client.async_infer(target.model, client_inputs([question]), request_id=str(number))
        for number, question in enumerate(QUESTIONS[:4])
    ]
    results = [one.get_result(timeout=PATIENCE) for one in running]
    assert [one.get_response()["id"] for one in results] == ["0", "1", "2", "3"]
    assert [answers_of(one)[0] for one in results] == [ask(target, [q])[0] for q in QUESTIONS[:4]]


def test_data_may_be_nested_as_the_shape_is(target: Target) -> None:
    request = json_request(QUESTIONS[:2])
    for one in request["inputs"]:
        one["data"] = [[text] for text in one["data"]]
    reply = send(target, target.path("infer"), request)
    assert reply.status == 200, reply.body
    assert json_answers(reply.json()) == ask(target, QUESTIONS[:2])
