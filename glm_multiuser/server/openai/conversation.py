"""Converts the messages of a chat to the library's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.openai.messages import ChatMessage
from glm_multiuser.tokenizers.calls import read_json_arguments


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Converts messages for `MultiUserLLM.chat_token_ids`, which checks their roles.

    Models do not see call ids and match results to calls by position, so results are sorted in
    the order of their calls.

    Raises:
        APIError: 400, a result without a preceding call, or a second result of a call.
    """
    written: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    results: dict[int, dict[str, Any]] = {}
    for number, message in enumerate(messages):
        if message.tool_call_id is None:
            written += _in_order(results)
            written.append(_as_library_message(message))
            results = {}
            places = {call.id: place for place, call in enumerate(message.tool_calls or ())}
            continue
        place = places.pop(message.tool_call_id, None)
        if place is None:
            raise bad_request(
                f"messages[{number}] has tool_call_id {message.tool_call_id[:80]!r}; it must be "
                "that of a call in the assistant's message before it, and each call has one result",
                field="messages",
            )
        results[place] = _as_library_message(message)
    return written + _in_order(results)


def _in_order(results: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [results[place] for place in sorted(results)]


def _as_library_message(message: ChatMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    written: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return written


def _arguments(given: str) -> str:
    """Returns the arguments, or an empty object instead of what is no JSON object.

    Agents send a call that was cut off back in every later turn, so an error would end the
    conversation. OpenAI's and vLLM's servers accept it, too.
    """
    return given if read_json_arguments(given) is not None else "{}"
