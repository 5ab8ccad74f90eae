"""Requests over every protocol, each with its own client."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import anthropic
import httpx
import openai

from tests.server.process import MODEL

PATIENCE = 300.0


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        protocol: a name in `PROTOCOLS`.
        session: the session; None: any slot.
        leave_after: number of pieces before the client disconnects; None: it stays.
    """

    protocol: str
    prompt: str
    history: tuple[tuple[str, str], ...]
    session: Optional[str]
    sampling: dict[str, Any] = field(hash=False)
    leave_after: Optional[int] = None


@dataclass(frozen=True)
class Heard:
    """A client's result: text and finish reason (None: disconnected, or not reported)."""

    text: str
    finish_reason: Optional[str]


class Clients:
    """The clients of one thread, closed at its end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )
        self.anthropic = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=PATIENCE
        )

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.anthropic.close()

    def ask(self, ask: Ask) -> Heard:
        """The answer, up to a disconnect."""
        return PROTOCOLS[ask.protocol](self, ask)


def _headers(ask: Ask) -> dict[str, str]:
    return {"X-Session-Id": ask.session} if ask.session else {}


def _messages(ask: Ask) -> list[Any]:
    messages = []
    for question, answer in ask.history:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": ask.prompt}]


def _chat(clients: Clients, ask: Ask) -> Heard:
    stream = clients.openai.chat.completions.create(
        model=MODEL,
        messages=_messages(ask),
        stream=True,
        user=ask.session or openai.omit,
        extra_body=ask.sampling,
    )
    texts: list[str] = []
    reason = None
    with stream:
        for chunk in stream:
            if len(texts) == ask.leave_after:
                break
            (choice,) = chunk.choices
            texts.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
    return Heard("".join(texts), reason)


def _chat_whole(clients: Clients, ask: Ask) -> Heard:
    whole = clients.openai.chat.completions.create(
        model=MODEL, messages=_messages(ask), extra_body=ask.sampling
    )
    (choice,) = whole.choices
    return Heard(choice.message.content or "", choice.finish_reason)


def _anthropic_messages(clients: Clients, ask: Ask) -> Heard:
    sampling = dict(ask.sampling)
    stream = clients.anthropic.messages.create(
        model=MODEL,
        messages=_messages(ask),
        stream=True,
        max_tokens=sampling.pop("max_tokens"),
        metadata={"user_id": ask.session},
        extra_body=sampling,
    )
    texts: list[str] = []
    reason: Optional[str] = None
    with stream:
        for event in stream:
            if len(texts) == ask.leave_after:
                break
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                texts.append(event.delta.text)
            elif event.type == "message_delta":
                reason = event.delta.stop_reason
    return Heard("".join(texts), reason)


def _responses(clients: Clients, ask: Ask) -> Heard:
    sampling = dict(ask.sampling)
    stream = clients.openai.responses.create(
        model=MODEL,
        input=_messages(ask),
        stream=True,
        max_output_tokens=sampling.pop("max_tokens"),
        user=ask.session or openai.omit,
        extra_body=sampling,
    )
    texts: list[str] = []
    status: Optional[str] = None
    with stream:
        for event in stream:
            if len(texts) == ask.leave_after:
                break
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            elif event.type in ("response.completed", "response.incomplete"):
                status = event.type
    return Heard("".join(texts), status)


def _events(clients: Clients, path: str, ask: Ask, body: dict[str, Any]) -> Iterator[Any]:
    """Events of a stream, until the client disconnects."""
    with clients.http.stream("POST", path, json=body, headers=_headers(ask)) as response:
        response.raise_for_status()
        count = 0
        for line in response.iter_lines():
            if count == ask.leave_after:
                return
            if line.startswith("data: "):
                count += 1
                yield json.loads(line[len("data: ") :])


def _v2_body(ask: Ask) -> dict[str, Any]:
    sampling = dict(ask.sampling)
    return {
        "prompt": ask.prompt,
        "history": json.dumps(ask.history),
        "temperature": str(sampling.pop("temperature")),
        "max_token": str(sampling.pop("max_tokens")),
        "parameters": sampling,
    }


def _generate_stream(clients: Clients, ask: Ask) -> Heard:
    path = f"/v2/models/{MODEL}/generate_stream"
    texts, reason = [], None
    for event in _events(clients, path, ask, _v2_body(ask)):
        texts.append(event["response"])
        reason = event.get("finish_reason")
    return Heard("".join(texts), reason)


def _infer(clients: Clients, ask: Ask) -> Heard:
    body = _v2_body(ask)
    parameters = body.pop("parameters")
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [value]}
        for name, value in body.items()
    ]
    response = clients.http.post(
        f"/v2/models/{MODEL}/infer",
        json={"inputs": inputs, "parameters": parameters},
        headers=_headers(ask),
    )
    response.raise_for_status()
    outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
    history = json.loads(outputs["history"][0])
    if history != [*map(list, ask.history), [ask.prompt, outputs["response"][0]]]:
        raise AssertionError(f"the history is {history}")
    return Heard(outputs["response"][0], None)


def _simple(clients: Clients, ask: Ask) -> Heard:
    body = {"prompt": ask.prompt, "history": ask.history, "stream": True, **ask.sampling}
    texts, reason = [], None
    for event in _events(clients, "/", ask, body):
        texts.append(event["delta"])
        reason = event.get("finish_reason")
    return Heard("".join(texts), reason)


def _step(clients: Clients, ask: Ask) -> Heard:
    body = {
        "cache_id": uuid.uuid4().hex,
        "query": ask.prompt,
        "history": ask.history,
        "do_sample": False,
        "max_length": 240,
    }
    texts: list[str] = []
    while not texts or len(texts) != ask.leave_after:  # without a call there is no request
        response = clients.http.post("/llm/generate", json=body, headers=_headers(ask))
        response.raise_for_status()
        step = response.json()
        texts.append(step["delta_text"])
        if step["flag"] == "end":
            return Heard("".join(texts), "end")
    return Heard("".join(texts), None)


PROTOCOLS: dict[str, Callable[[Clients, Ask], Heard]] = {
    "chat": _chat,
    "chat, whole": _chat_whole,
    "messages": _anthropic_messages,
    "responses": _responses,
    "generate_stream": _generate_stream,
    "infer": _infer,
    "simple": _simple,
    "step": _step,
}
CAN_BE_LEFT = ("chat", "messages", "responses", "generate_stream", "simple", "step")
"""Protocols whose clients can disconnect in the middle of an answer."""
