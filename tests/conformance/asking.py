"""How the tests ask. The model under test is text in, text out:

    inputs   prompt, history, temperature, max_token   BYTES [N, 1]
             history_len                               INT16 [N, 1], optional
    outputs  response, history                         BYTES [N, 1]

`history` is JSON, [["question", "answer"], ...]; the output has the new round at its end. With
temperature "0" the same question gets the same answer. The model takes batches of at least 4.
"""

from __future__ import annotations

import http.client
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union
from urllib.parse import urlsplit

import numpy as np
from tritonclient.http import InferInput, InferRequestedOutput, InferResult

PATIENCE = 120.0
"""Seconds after which a test that would hang fails instead."""

MAX_TOKEN = "12"
QUESTIONS = (
    "你是谁",
    "你好",
    "Who are you?",
    "晚上睡不着应该怎么办",
    "What can you do?",
    "1+1=?",
    "hello",
    "请介绍一下北京",
    "What is a cache?",
    "再见",
)


@dataclass(frozen=True)
class Target:
    """A server under test.

    Attributes:
        url: without a slash at its end.
        model: its name.
        control: whether it may be unloaded and loaded.
        own: whether it is this project's, which never answers 5xx to a client's mistake.
    """

    url: str
    model: str
    control: bool
    own: bool

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return urlsplit(self.url).netloc

    def path(self, *parts: str) -> str:
        """A path below the model's own."""
        return "/".join(("/v2/models", self.model, *parts))


@dataclass(frozen=True)
class Reply:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes
    own: bool = False

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> str:
        """The message of a refusal."""
        assert 400 <= self.status < (500 if self.own else 600), (self.status, self.body)
        message = self.json()["error"]
        assert isinstance(message, str)
        assert message
        return message


def send(
    target: Target,
    path: str,
    body: Union[bytes, dict[str, Any], None] = None,
    headers: Optional[dict[str, str]] = None,
) -> Reply:
    """A POST of a body, or a GET without one; no header that is not given, no Content-Type."""
    connection = http.client.HTTPConnection(target.address, timeout=PATIENCE)
    try:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request("GET" if data is None else "POST", path, data, headers or {})
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, names, response.read(), target.own)
    finally:
        connection.close()


def tensor(
    name: str, values: Sequence[Union[str, bytes, int]], datatype: str = "BYTES"
) -> dict[str, Any]:
    """An input of shape [N, 1] with its data as JSON."""
    return {
        "name": name,
        "shape": [len(values), 1],
        "datatype": datatype,
        "data": list(values),
    }


def texts_of(prompts: Sequence[str], histories: Sequence[str] = ()) -> dict[str, Sequence[str]]:
    """The four texts that every question has."""
    count = len(prompts)
    return {
        "prompt": prompts,
        "history": histories or ["[]"] * count,
        "temperature": ["0"] * count,
        "max_token": [MAX_TOKEN] * count,
    }


def json_request(prompts: Sequence[str], histories: Sequence[str] = ()) -> dict[str, Any]:
    """An inference request that is nothing but JSON."""
    texts = texts_of(prompts, histories)
    return {"inputs": [tensor(name, values) for name, values in texts.items()]}


def packed(texts: Sequence[Union[str, bytes]]) -> bytes:
    """The binary data of a BYTES tensor."""
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)


def binary_request(texts: dict[str, Sequence[str]]) -> tuple[dict[str, Any], bytes]:
    """-> the JSON of a request whose inputs are binary, and the bytes behind it."""
    data = {name: packed(values) for name, values in texts.items()}
    inputs = [
        {
            "name": name,
            "shape": [len(values), 1],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": len(data[name])},
        }
        for name, values in texts.items()
    ]
    return {"inputs": inputs}, b"".join(data.values())


def client_inputs(
    prompts: Sequence[str], histories: Sequence[str] = (), binary: bool = True
) -> list[InferInput]:
    """Inputs of the official client."""
    return [
        client_input(name, np.array(values, np.object_), binary)
        for name, values in texts_of(prompts, histories).items()
    ]


def client_input(name: str, values: Any, binary: bool = True) -> InferInput:
    """One input of the official client, of shape [N, 1]."""
    column = values.reshape(-1, 1)
    datatype = "BYTES" if values.dtype == np.object_ else "INT16"
    one = InferInput(name, list(column.shape), datatype)
    one.set_data_from_numpy(column, binary_data=binary)
    return one


def client_outputs(binary: bool = True) -> list[InferRequestedOutput]:
    """Both outputs, asked for by their names."""
    return [InferRequestedOutput(name, binary_data=binary) for name in ("response", "history")]


@dataclass(frozen=True)
class Answer:
    """One row of the outputs."""

    response: str
    history: list[Any]


def answers_of(result: InferResult) -> list[Answer]:
    """The rows of an inference's outputs, whose shapes are checked."""
    columns = []
    for name in ("response", "history"):
        column = result.as_numpy(name)
        assert column.shape == (len(column), 1)
        columns.append([_text(value) for value in column[:, 0]])
    return [Answer(text, json.loads(history)) for text, history in zip(*columns)]


def json_answers(body: Any) -> list[Answer]:
    """The rows of the outputs in a reply that is nothing but JSON."""
    outputs = {output["name"]: output for output in body["outputs"]}
    assert sorted(outputs) == ["history", "response"]
    for output in outputs.values():
        assert output["datatype"] == "BYTES"
        assert output["shape"] == [len(output["data"]), 1]
    rows = zip(outputs["response"]["data"], outputs["history"]["data"])
    return [Answer(text, json.loads(history)) for text, history in rows]


def ask(target: Target, prompts: Sequence[str], histories: Sequence[str] = ()) -> list[Answer]:
    """Answers to questions, by the plainest request."""
    reply = send(target, target.path("infer"), json_request(prompts, histories))
    assert reply.status == 200, reply.body
    return json_answers(reply.json())


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else bytes(value).decode()
