"""Model lists and prompt token counts, read by the official clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.echoing import echo_llm, message
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings

CHECKED: Any = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(users=2), echo_llm) as server:
        yield server


def test_anthropics_client_lists_the_models(server: InProcessServer) -> None:
    with anthropic.Anthropic(base_url=server.url, **CHECKED) as client:
        (listed,) = list(client.models.list())
        assert (listed.id, listed.display_name, listed.lifecycle) == (MODEL, MODEL, "active")
        assert client.models.retrieve(MODEL) == listed


def test_openais_client_lists_the_models(server: InProcessServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", **CHECKED) as client:
        (listed,) = list(client.models.list())
        assert (listed.id, listed.object) == (MODEL, "model")
        assert client.models.retrieve(MODEL) == listed


def test_openais_client_counts_the_tokens_of_a_response(server: InProcessServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", **CHECKED) as client:
        fields: list[dict[str, Any]] = [{}, {"instructions": "be brief"}, {"tools": [TOOL]}]
        for more in fields:
            body: Any = {"model": MODEL, "input": message("hello " * 20), **more}
            usage = client.responses.create(**body).usage
            assert usage is not None
            assert client.responses.input_tokens.count(**body).input_tokens == usage.input_tokens
        first = client.responses.create(
            model=MODEL, input=message("a"), store=True, extra_body={"user": "me"}
        )
        behind: Any = {"model": MODEL, "input": "b", "previous_response_id": first.id}
        count = client.responses.input_tokens.count(**behind, extra_body={"user": "me"})
        assert first.usage is not None
        assert count.input_tokens > first.usage.input_tokens
        with pytest.raises(openai.NotFoundError, match="model 'none' is unknown"):
            client.responses.input_tokens.count(model="none", input="a")


def test_what_cannot_be_counted_is_named_as_what_cannot_be_answered(
    server: InProcessServer,
) -> None:
    half = "\ud800"  # of a surrogate pair
    responses: dict[str, Any] = {"input": message("a"), "instructions": half}
    asked = [{"role": "user", "content": half}]
    messages: dict[str, Any] = {"max_tokens": 1, "system": "a", "messages": asked}
    with httpx.Client(base_url=server.url) as client:
        for path, count, body, name in (
            ("/v1/responses", "input_tokens", responses, "instructions"),
            ("/v1/messages", "count_tokens", messages, r"messages\[0\]"),
        ):
            errors = []
            for url in (path, f"{path}/{count}"):
                if count in url:
                    body.pop("max_tokens", None)
                response = client.post(url, content=json.dumps(body))
                assert response.status_code == 400
                errors.append(response.json()["error"])
            assert errors[0] == errors[1]
            assert re.match(rf"{name}\['content'\] has ", errors[0]["message"])


def test_a_stored_response_is_not_streamed(server: InProcessServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    mine = {"X-Session-Id": "me"}
    kept = client.responses.create(model=MODEL, input="ab", store=True, extra_headers=mine)
    with pytest.raises(openai.BadRequestError, match="not streamed") as raised:
        client.responses.retrieve(kept.id, stream=True, extra_headers=mine)
    assert raised.value.param == "stream"
    assert client.responses.retrieve(kept.id, extra_headers=mine) == kept
