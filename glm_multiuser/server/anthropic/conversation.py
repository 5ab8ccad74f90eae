"""Converts requests of the Messages API to chats."""

from __future__ import annotations

from typing import Any, Optional, Union

from glm_multiuser.errors import shown
from glm_multiuser.server.anthropic.requests import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    OutputFormat,
    TextBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from glm_multiuser.server.errors import NO_THREADS, APIError, bad_request
from glm_multiuser.server.openai.adapter import Chat, chat_tool
from glm_multiuser.server.openai.chat import chat_call
from glm_multiuser.tokenizers.calls import write_json

NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "user": "metadata.user_id",
    "tool_call_id": "tool_use_id",
    "tool_calls": "tool_use",
}
MODES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: CountTokensRequest) -> Chat:
    """Converts a request to a chat.

    Raises:
        APIError: 400, misplaced blocks, tool input that cannot be written as JSON, or a thread.
    """
    if isinstance(body, MessagesRequest) and body.thread is not None:
        raise APIError(
            400,
            NO_THREADS,
            f"thread is {shown(body.thread)}; this server stores no conversations, so it must be "
            "null, and messages the whole conversation",
            "thread",
        )
    messages, places = [], []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
        places.append("system")
    for number, message in enumerate(body.messages):
        for one in _chat_messages(message, f"messages[{number}]"):
            messages.append(one)
            places.append(f"messages[{number}]")
    choice = body.tool_choice
    one_call = choice is not None and choice.disable_parallel_tool_use
    form = body.output_config and body.output_config.format
    continues = body.messages[-1].role == "assistant"
    if form is not None and continues:
        raise bad_request(
            "output_config.format describes the whole answer, so the last message cannot be its "
            "beginning",
            "output_config.format",
        )
    if continues and "tool_calls" in messages[-1]:
        raise bad_request(
            f"{places[-1]} is the last one and has a tool_use; it can only have text, the "
            "beginning of the answer",
            places[-1],
        )
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": [chat_tool(tool, tool.input_schema) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if one_call else None,
        "response_format": form and _response_format(form),
        "continue_final_message": continues,
    }
    if isinstance(body, MessagesRequest):
        fields.update(
            body.chat_fields("max_tokens"),
            stop=body.stop_sequences,
            user=body.metadata and body.metadata.user_id,
        )
    return Chat(fields, NAMES, places)


def _chat_messages(message: Message, place: str) -> list[dict[str, Any]]:
    """Converts a message; each tool result becomes a message of its own, before the text."""
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[TextBlock] = []
    for number, block in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolUseBlock):
            _check_role(message, "assistant", block.type, where)
            try:
                arguments = write_json(block.input)
            except (ValueError, RecursionError) as error:
                problem = f"{where}.input cannot be written as JSON: {error}"
                raise bad_request(problem, where) from None
            calls.append(chat_call(block.id, block.name, arguments))
        elif isinstance(block, ToolResultBlock):
            _check_role(message, "user", block.type, where)
            if texts:
                raise bad_request(f"{where} is a tool_result; it must come before all texts", where)
            content = _text(block.content or [])
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    written: dict[str, Any] = {"role": message.role, "content": _text(texts)}
    if calls:
        written["tool_calls"] = calls
    return [*results, written] if texts or not results else results


def _check_role(message: Message, role: str, kind: str, where: str) -> None:
    if message.role != role:
        wanted = f"only a message of role {role!r} can have one"
        raise bad_request(
            f"{where} is a {kind} in a message of role {message.role!r}; {wanted}", where
        )


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _tool_choice(choice: Optional[ToolChoice]) -> Union[str, dict[str, Any], None]:
    if choice is None:
        return None
    if choice.name is None:
        return MODES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(wanted: OutputFormat) -> dict[str, Any]:
    return {"type": wanted.type, "json_schema": {"schema": wanted.json_schema}}
