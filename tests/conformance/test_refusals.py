"""Requests that cannot be: refused as the protocol says it, and the server lives on."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Callable

import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.conformance.asking import (
    Target,
    ask,
    binary_request,
    client_inputs,
    json_request,
    packed,
    send,
    tensor,
    texts_of,
)

Request = dict[str, Any]
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(autouse=True)
def _alive(target: Target) -> Iterator[None]:
    """Whatever a test sent, the server answers afterwards."""
    yield
    ask(target, ["hello"])


def changed(change: Callable[[Request], object]) -> Request:
    request = json_request(["hello"])
    change(request)
    return request


WRONG = {
    "no inputs": lambda request: request.pop("inputs"),
    "inputs is no list": lambda request: request.update(inputs="prompt"),
    "prompt is missing": lambda request: request["inputs"].pop(0),
    "an input that is unknown": lambda request: request["inputs"].append(tensor("nonsense", ["x"])),
    "an output that is unknown": lambda request: request.update(outputs=[{"name": "nonsense"}]),
    "another datatype": lambda request: request["inputs"][0].update(datatype="INT32", data=[1]),
    "a datatype that does not exist": lambda request: request["inputs"][0].update(datatype="TEXT"),
    "numbers for texts": lambda request: request["inputs"][0].update(data=[5]),
    "too few elements": lambda request: request["inputs"][0].update(shape=[2, 1]),
    "too many elements": lambda request: request["inputs"][0].update(data=["a", "b"]),
    "no data": lambda request: request["inputs"][0].pop("data"),
    "no shape": lambda request: request["inputs"][0].pop("shape"),
    "another second dimension": lambda request: request["inputs"][0].update(
        shape=[1, 2], data=["a", "b"]
    ),
    "three dimensions": lambda request: request["inputs"][0].update(shape=[1, 1, 1]),
    "a negative shape": lambda request: request["inputs"][0].update(shape=[-1, 1]),
    "a batch of other inputs' sizes": lambda request: request["inputs"][0].update(
        shape=[2, 1], data=["a", "b"]
    ),
    "a batch that is too large": lambda request: request.update(json_request(["hello"] * 4096)),
    "memory of the client": lambda request: request["inputs"][0].update(
        data=None, parameters={"shared_memory_region": "r", "shared_memory_byte_size": 9}
    ),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request(target: Target, change: Callable[[Request], object]) -> None:
    assert send(target, target.path("infer"), changed(change)).error()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"inputs": [' * 20_000], ids=range(6)
)
def test_a_body_that_is_no_request(target: Target, body: bytes) -> None:
    assert send(target, target.path("infer"), body).error()


HISTORIES = [
    "nonsense",
    "[",
    '{"a": 1}',
    "[1]",
    '[["only a question"]]',
    '[["a", 1]]',
    '__import__("os").getcwd()',
]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_history_that_is_none(target: Target, history: str) -> None:
    reply = send(target, target.path("infer"), json_request(["hello"], [history]))
    assert "history" in reply.error()


@pytest.mark.parametrize(
    ("name", "text"),
    [("temperature", "warm"), ("temperature", "-1"), ("max_token", "many"), ("max_token", "0")],
)
def test_a_number_that_is_none(target: Target, name: str, text: str) -> None:
    request = json_request(["hello"])
    for one in request["inputs"]:
        if one["name"] == name:
            one["data"] = [text]
    reply = send(target, target.path("infer"), request)
    assert name in reply.error()


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_an_unknown_model_or_version(target: Target, path: str) -> None:
    for prefix in ("/v2/models/no-such-model", target.path("versions", "99")):
        assert send(target, f"{prefix}/{path}", json_request(["hello"])).error()


def test_the_official_client_shows_message_and_status(
    client: InferenceServerClient, target: Target
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(target.model, client_inputs(["hello"])[1:])
    assert caught.value.status() == "400"
    assert "decoding the response" not in caught.value.message()


# Binary data whose lengths lie.


def sent_binary(
    target: Target,
    length: Callable[[int], str] = str,
    change: Callable[[Request], object] = lambda head: None,
    data: Callable[[bytes], bytes] = lambda data: data,
) -> str:
    """The error of a binary request that was changed."""
    head, behind = binary_request(texts_of(["hello"]))
    change(head)
    encoded = json.dumps(head).encode()
    headers = {LENGTH: length(len(encoded))}
    return send(target, target.path("infer"), encoded + data(behind), headers).error()


@pytest.mark.parametrize(
    "length",
    [
        lambda real: "100000000",
        lambda real: "99999999999999999999999",
        lambda real: "-1",
        lambda real: "nonsense",
        lambda real: "0",
        lambda real: str(real - 1),
        lambda real: str(real + 1),
    ],
    ids=["too large", "huge", "negative", "no number", "0", "one less", "one more"],
)
def test_a_length_of_the_json_that_lies(target: Target, length: Callable[[int], str]) -> None:
    assert sent_binary(target, length)


@pytest.mark.parametrize("size", [0, 1, 8, 10, 10**6, 2**62, -1])
def test_a_size_of_an_input_that_lies(target: Target, size: int) -> None:
    def lie(head: Request) -> None:
        head["inputs"][0]["parameters"]["binary_data_size"] = size

    assert sent_binary(target, change=lie)


def test_bytes_that_belong_to_no_input(target: Target) -> None:
    assert sent_binary(target, data=lambda data: data + b"more")


def test_bytes_that_are_missing(target: Target) -> None:
    assert sent_binary(target, data=lambda data: data[:-1])


@pytest.mark.parametrize("length", [0, 4, 6, 2**31, 2**32 - 1])
def test_a_length_of_an_element_that_lies(target: Target, length: int) -> None:
    assert sent_binary(target, data=lambda data: struct.pack("<I", length) + data[4:])


@pytest.mark.parametrize("texts", [[], ["a", "b"]], ids=["none", "two"])
def test_another_number_of_elements_than_the_shape_says(target: Target, texts: list[str]) -> None:
    def change(head: Request) -> None:
        head["inputs"][0]["parameters"]["binary_data_size"] = len(packed(texts))

    old = len(packed(["hello"]))
    assert sent_binary(target, change=change, data=lambda data: packed(texts) + data[old:])


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_compressed_as_it_says(target: Target, encoding: str) -> None:
    body = json.dumps(json_request(["hello"])).encode()
    assert send(target, target.path("infer"), body, {"Content-Encoding": encoding}).error()
