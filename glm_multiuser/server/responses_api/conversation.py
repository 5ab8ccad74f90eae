"""Converts requests of `/v1/responses` to chats, and responses to messages of the next chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from glm_multiuser.server.openai.adapter import Chat
from glm_multiuser.server.openai.chat import chat_call
from glm_multiuser.server.responses_api.items import chat_messages
from glm_multiuser.server.responses_api.requests import ResponseRequest, TextFormat
from glm_multiuser.server.responses_api.tools import chat_name, chat_tools

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "tool_call_id": "call_id",
    "tool_calls": "function_call",
}


def as_chat(body: ResponseRequest, before: Sequence[dict[str, Any]]) -> Chat:
    """Converts a request to a chat.

    Args:
        body: of the request.
        before: messages of the conversation up to the previous response, inclusive.
    """
    system = {"role": "system", "content": body.instructions}
    instructions = [system] if body.instructions is not None else []
    messages, places = chat_messages(body.input)
    choice = body.tool_choice
    fields = {
        **body.chat_fields("model", "parallel_tool_calls", "stop", "user"),
        "messages": [*instructions, *before, *messages],
        "tools": chat_tools(body.tools or ()) or None,
        "tool_choice": choice.as_chat() if isinstance(choice, BaseModel) else choice,
        "response_format": _response_format(body.text_format),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs or None,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
    }
    known = ["instructions"] * len(instructions) + ["previous_response_id"] * len(before)
    return Chat(fields, NAMES, [*known, *places])


def messages_after(chat: Chat, output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages that precede those of the next request: all but instructions."""
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    calls = [
        chat_call(
            item["call_id"], chat_name(item["name"], item.get("namespace")), item["arguments"]
        )
        for item in output
        if item["type"] == "function_call"
    ]
    answer = {"role": "assistant", "content": "".join(texts), "tool_calls": calls or None}
    messages = chat.fields["messages"][chat.places.count("instructions") :]
    return [*messages, answer]


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type, "schema": wanted.json_schema}
    schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}
