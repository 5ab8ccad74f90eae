"""Tools and sessions of the real command with chatglm3-tiny and the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.openai_reading import sync_client
from tests.server.process import ROOT, ServerProcess

MODEL = "chatglm3-tiny"
EXAMPLES = ROOT / "examples/train_chatglm3_tiny"
SETTINGS = ("--users", "2", "--seq-length", "1024", "--prefill-chunk", "32")

pytestmark = pytest.mark.skipif(
    not (ROOT / "ckpt" / MODEL / "model.safetensors").is_file(),
    reason=f"ckpt/{MODEL} has no model.safetensors; {EXAMPLES.name} trains it",
)

Message = dict[str, Any]


def learned_dialogues() -> list[tuple[list[Message], list[Any]]]:
    """Messages that the model learned, with the tools that were offered."""
    tools = json.loads((EXAMPLES / "tools.json").read_text(encoding="utf-8"))
    lines = (EXAMPLES / "tool_calls.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = []
    for line in map(json.loads, lines):
        values = line["values"]
        if "a" in values:
            values["sum"] = values["a"] + values["b"]
        text = json.dumps(line["messages"], ensure_ascii=False)
        for name, value in values.items():
            text = text.replace(f"<{name}>", str(value))
        offered = [tool for tool in tools if tool["function"]["name"] in line["tools"]]
        dialogues.append((json.loads(text), offered))
    return dialogues


DIALOGUES = learned_dialogues()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("--checkpoint", f"ckpt/{MODEL}", *SETTINGS) as process:
        yield process.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with sync_client(url) as client:
        yield client


def said(client: openai.OpenAI, **body: Any) -> tuple[Any, str, Any]:
    """The message of an answer, why it ended, and the usage."""
    completion = client.chat.completions.create(model=MODEL, temperature=0, **body)
    choice = completion.choices[0]
    return choice.message, choice.finish_reason, completion.usage


def said_streaming(client: openai.OpenAI, **body: Any) -> tuple[Any, str, Any]:
    """The same, joined by the client from a stream."""
    options: Any = {"include_usage": True}
    tools: Any = [
        {**tool, "function": {**tool["function"], "strict": True}} for tool in body.pop("tools")
    ]
    with client.chat.completions.stream(
        model=MODEL, temperature=0, stream_options=options, tools=tools, **body
    ) as stream:
        completion = stream.get_final_completion()
    choice = completion.choices[0]
    return choice.message, choice.finish_reason, completion.usage


@pytest.mark.parametrize("ask", [said, said_streaming])
@pytest.mark.parametrize("number", range(len(DIALOGUES)))
def test_a_dialogue_with_tools(client: openai.OpenAI, number: int, ask: Any) -> None:
    """Calls are answered as the tools would, and the dialogue goes on with what the model said."""
    learned, tools = DIALOGUES[number]
    session = f"{ask.__name__} {number}"
    told: list[Any] = []
    call_id, earlier = "", 0
    for message in learned:
        if message["role"] != "assistant":
            told.append({**message, "tool_call_id": call_id} if call_id else message)
            call_id = ""
            continue
        answer, reason, usage = ask(client, messages=told, tools=tools, user=session)
        calls = [
            (call.function.name, json.loads(call.function.arguments))
            for call in answer.tool_calls or ()
        ]
        expected = [call["function"] for call in message.get("tool_calls", ())]
        assert calls == [(one["name"], json.loads(one["arguments"])) for one in expected]
        assert (answer.content or None) == message["content"]
        assert reason == ("tool_calls" if calls else "stop")
        assert usage.prompt_tokens_details.cached_tokens >= earlier
        earlier = usage.prompt_tokens
        told.append(answer)
        if answer.tool_calls:
            call_id = answer.tool_calls[0].id


def test_the_second_turn_of_a_session_starts_behind_the_first(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "你是谁"}
    first, _, before = said(client, messages=[question], user="anna")
    again = {"role": "user", "content": "Who are you?"}
    body: dict[str, Any] = {"messages": [question, first, again], "user": "anna"}
    second, _, usage = said(client, **body)
    assert before.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens > before.prompt_tokens  # its own words, too
    computed, _, whole = said(client, **body, extra_body={"cache_prompt": False})
    assert whole.prompt_tokens_details.cached_tokens == 0
    assert computed.content == second.content


def test_content_has_no_blank_header(client: openai.OpenAI) -> None:
    answer, _, _ = said(client, messages=[{"role": "user", "content": "你是谁"}])
    assert answer.content == answer.content.strip() != ""
