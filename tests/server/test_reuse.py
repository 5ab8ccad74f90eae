"""A session's cached prefix is not recomputed, unless the request disables the cache."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from glm_multiuser import ConfigError, EngineConfig, MultiUserLLM
from glm_multiuser.cli.commands import app
from glm_multiuser.server import loading, logs, run
from glm_multiuser.server.settings import ModelSettings, ServerSettings
from tests.server.asking import ask as ask_simply
from tests.server.asking import events_of, post, step_to_end
from tests.server.echoing import echo_llm, message
from tests.server.in_process import FOLDER, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import CHAT, COMPLETIONS, ask, ask_streaming, question

FIRST = question(message("hello"))
TOLD = [*FIRST, {"role": "assistant", "content": "hello"}, *question(message("again"))]

served = partial(in_process_server, mock_settings(users=2), echo_llm)


def usages(server: InProcessServer, *conversations: Any, **fields: Any) -> list[tuple[int, int]]:
    """Of each conversation the tokens of its prompt, and how many of them were still there."""
    told = []
    for messages in conversations:
        usage: Any = ask(server.url, CHAT, messages=messages, **fields).usage
        told.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return told


def test_the_second_turn_of_a_session_starts_behind_the_first() -> None:
    with served() as server:
        (first, none), (second, held) = usages(server, FIRST, TOLD, user="anna")
        assert none == 0
        assert held == first < second
        options = {"include_usage": True}
        streamed = ask_streaming(
            server.url, CHAT, messages=TOLD, user="anna", stream_options=options
        )
        assert streamed.usage is not None
        # The last token of a prompt is always computed: its logits are needed.
        assert streamed.usage["prompt_tokens_details"] == {"cached_tokens": second - 1}


def test_without_a_session_nothing_is_held() -> None:
    with served() as server:
        assert [held for _, held in usages(server, FIRST, TOLD, TOLD)] == [0, 0, 0]


def test_nothing_of_another_session_is_used() -> None:
    with served() as server:
        usages(server, FIRST, user="anna")
        assert [held for _, held in usages(server, TOLD, user="bela")] == [0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_can_have_all_of_its_prompt_computed(path: str) -> None:
    body: Any = {"messages": TOLD} if path == CHAT else {"prompt": message("hello")}
    with served() as server:
        answers = [
            ask(server.url, path, user="anna", **body, **fields)
            for fields in ({}, {"cache_prompt": True}, {"cache_prompt": False})
        ]
    assert [answer.choices for answer in answers] == [answers[0].choices] * 3
    held = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]  # type: ignore[index]
    assert held[0] == held[2] == 0 < held[1]


def test_a_server_can_be_told_to_compute_every_prompt_whole() -> None:
    settings = mock_settings(users=2)
    models = tuple(
        replace(model, engine=replace(model.engine, cache_prompt=False))
        for model in settings.models
    )
    with in_process_server(replace(settings, models=models), echo_llm) as server:
        assert [held for _, held in usages(server, FIRST, TOLD, user="anna")] == [0, 0]


def test_the_command_hears_how_prompts_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ServerSettings] = []

    async def serve(settings: ServerSettings, listening: socket.socket, announce: object) -> None:
        told.append(settings)
        listening.close()

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(logs, "configure_logging", lambda as_json: None)
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    flags = ("--prefill-chunk", "64", "--no-cache-prompt")
    for arguments in ((), flags):
        command = ("serve", "--port", "0", "--available", f"two={FOLDER}")
        assert CliRunner().invoke(app, [*command, *arguments]).exit_code == 0
    ways = [
        [
            (model.engine.prefill_chunk, model.engine.cache_prompt, model.load)
            for model in settings.models
        ]
        for settings in told
    ]
    assert ways == [
        [(None, True, True), (None, True, False)],
        [(64, False, True), (64, False, False)],
    ]


def test_a_model_is_opened_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        MultiUserLLM, "from_pretrained", lambda folder, **settings: given.update(settings)
    )
    loading.open_llm(
        ModelSettings("one", FOLDER, EngineConfig(prefill_chunk=64, cache_prompt=False))
    )
    assert (given["prefill_chunk"], given["cache_prompt"]) == (64, False)


def test_a_chunk_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk is 0; it must be between"):
        ModelSettings("one", FOLDER, EngineConfig(prefill_chunk=0))


def test_no_protocol_shows_the_header_of_an_answer() -> None:
    """What the answer's reader leaves out is left out everywhere."""
    prompt = message("hello")
    with served() as server:
        assert ask_simply(server, prompt).json()["response"] == "hello"
        assert ask_simply(server, prompt).json()["history"] == [[prompt, "hello"]]
        events = events_of(ask_simply(server, prompt, stream=True).text)
        assert "".join(event["delta"] for event in events) == "hello"
        assert events[-1]["response"] == "hello"
        assert step_to_end(server, "one", prompt) == "hello"
        generated = post(server, "/v2/models/mock/generate", {"prompt": prompt}).json()
        assert generated["response"] == "hello"
        tensor = {"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": [prompt]}
        inferred = post(server, "/v2/models/mock/infer", {"inputs": [tensor]}).json()
        outputs = {output["name"]: output["data"] for output in inferred["outputs"]}
        assert outputs["response"] == ["hello"]
