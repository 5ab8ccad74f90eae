"""Errors of `/v1/messages` are in Anthropic's format, whatever raises them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.engine.mock_runner import SEQ_LENGTH
from tests.server.anthropic_reading import MESSAGES, anthropic_client
from tests.server.asking import FAILS, HTTP, KEYS, Wire, llm_that_fails
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings

COUNT = f"{MESSAGES}/count_tokens"
HELLO: Any = [{"role": "user", "content": "hello"}]
CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
TEXT = {"type": "text", "text": "x"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    """With keys, and a model that can fail."""
    settings = mock_settings(users=2, max_queue=2, keys=KEYS, limits={"body_bytes": 20_000})
    with in_process_server(settings, llm_that_fails) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: InProcessServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server.url, api_key=KEYS["red"]) as client:
        yield client


def with_block(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [TEXT, block]}, *HELLO]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages.0.role: "),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
    (with_block({"type": "image", "source": {}}), "this server reads no images"),
    (with_block({"type": "document", "source": {}}), "this server reads no images, documents"),
    (with_block(CALL), "messages[0].content[1] is a tool_use in a message of role 'user'"),
    (with_block(RESULT, "assistant"), "only a message of role 'user' can have one"),
    (with_block(RESULT), "messages[0].content[1] is a tool_result; it must come before all texts"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0] has tool_use_id '1'"),
    ({"system": "x", "messages": [{"role": "user", "content": [RESULT]}]}, "messages[0] has"),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": None}, "max_tokens: "),
    ({"temperature": -1}, "temperature: "),
    ({"top_k": -1}, "top_k: "),
    ({"top_p": 2}, "top_p: "),
    ({"stop_sequences": [""]}, "stop_sequences.0: "),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
    ({"tools": [TOOL]}, "tools is "),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: "),
    ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "this server runs no tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name: "),
    ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name: "),
    ({"thinking": {"type": "often"}}, "thinking.type: "),
    ({"metadata": {"user_id": "x" * 257}}, "the session's name has 257 characters"),
    (
        {
            "messages": [*HELLO, {"role": "assistant", "content": "{"}],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        "output_config.format describes the whole answer",
    ),
    (
        {
            "messages": [*HELLO, {"role": "assistant", "content": "I"}],
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
        },
        "tool_choice forces a call",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [TEXT, CALL]}], "tools": [TOOL]},
        "messages[1] is the last one and has a tool_use; it can only have text",
    ),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: "),
    ({"temprature": 1}, "temprature: unknown field"),
    ({"messages": [{"role": "user", "content": "x" * SEQ_LENGTH}]}, f"seq_length {SEQ_LENGTH}"),
]


@pytest.mark.parametrize(("fields", "problem"), BAD, ids=lambda value: str(value)[:60])
def test_a_wrong_field(client: anthropic.Anthropic, fields: Any, problem: str) -> None:
    for stream in (False, True):
        body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, "stream": stream, **fields}
        with pytest.raises(anthropic.BadRequestError) as error:
            client.post(MESSAGES, body=body, cast_to=object)
        answer: Any = error.value.body
        assert set(answer) == {"type", "error"}
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert problem in answer["error"]["message"]
        assert error.value.request_id


def test_a_thread(client: anthropic.Anthropic) -> None:
    """Anthropic's own code says that it is not supported."""
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, "thread": {"type": "create"}}
    with pytest.raises(anthropic.BadRequestError) as error:
        client.post(MESSAGES, body=body, cast_to=object)
    described: Any = error.value.body
    assert described["error"]["type"] == "invalid_request_error"
    assert "thread is {'type': 'create'}; " in described["error"]["message"]
    assert described["error"]["details"] == {"error_code": "thread_unsupported_request"}
    client.post(MESSAGES, body={**body, "thread": None}, cast_to=object)


def test_a_body_that_is_no_json(server: InProcessServer) -> None:
    for path in (MESSAGES, COUNT):
        for body in (b'{"messages":', b"[]", b"", b"5", b"\xff", b"\x00"):
            headers = {"x-api-key": KEYS["red"]}
            response = HTTP.post(server.url + path, content=body, headers=headers)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


def test_keys(server: InProcessServer) -> None:
    """`x-api-key` opens as a bearer token does, which goes first."""
    red, blue = KEYS["red"], KEYS["blue"]
    for headers, status in (
        ({"x-api-key": red}, 200),
        ({"x-api-key": red, "authorization": f"Bearer {blue}"}, 200),
        ({"x-api-key": red, "authorization": "Basic abc"}, 200),
        ({"authorization": f"Bearer {red}"}, 200),
        ({"x-api-key": red, "authorization": "Bearer wrong-key-0123456789"}, 401),
        ({"x-api-key": "wrong-key-0123456789"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ):
        response = HTTP.post(server.url + COUNT, json={"messages": HELLO}, headers=headers)
        assert response.status_code == status, headers
        if status == 401:
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["request-id"]
    with anthropic_client(server.url, api_key=None, auth_token=red) as client:
        assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    with (
        anthropic_client(server.url, api_key="wrong-key-0123456789") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)


def test_what_middleware_rejects(server: InProcessServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as error:
        client.messages.create(model=MODEL, max_tokens=1, messages=HELLO, system="x" * 30_000)
    assert (error.value.status_code, error.value.type) == (413, "request_too_large")
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.type == "not_found_error"
    key = {"x-api-key": KEYS["red"]}
    for method, path, headers, status, kind in (
        ("GET", MESSAGES, key, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", key, 404, "not_found_error"),
        ("POST", MESSAGES, {**key, "origin": "https://foreign.example"}, 403, "permission_error"),
        ("POST", MESSAGES, {**key, "host": "foreign.example"}, 421, "invalid_request_error"),
    ):
        response = HTTP.request(method, server.url + path, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    wire = Wire(server.url)
    wire.send(f"POST {MESSAGES} HTTP/1.1\r\nx: {'x' * 70_000}\r\n".encode())
    assert b'"type":"invalid_request_error"' in wire.read_to_end()
    wire.close()


def test_an_answer_that_fails(server: InProcessServer, client: anthropic.Anthropic) -> None:
    body: Any = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": FAILS}]}
    with pytest.raises(anthropic.InternalServerError) as error:
        client.messages.create(**body)
    assert (error.value.status_code, error.value.type) == (500, "api_error")
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        list(client.messages.create(stream=True, **body))
