"""Conversations and tools in OpenAI's shape, checked before a family writes them its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.answers import ToolCall
from glm_multiuser.tokenizers.calls import DEEPEST, levels, read_json_arguments, write_json
from glm_multiuser.tokenizers.text import check_text, shown

MAY_FOLLOW = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "assistant with tool_calls": ("tool",),
    "tool": ("tool", "assistant", "user"),
}
"""What may come after a message of each role; "": at the beginning."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool" (what a tool returned).
        content: its text, perhaps "".
        calls: of an assistant's message; their arguments are JSON objects.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()


def read_messages(messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> list[Message]:
    """Checks a conversation whose last message awaits an answer.

    Args:
        messages: `{"role", "content"}`; an assistant's may have `tool_calls`, and then its
            content may be None.
        with_tools: whether the family knows tools; else messages about them are refused.

    Raises:
        InvalidParameterError: anything else; the message names its place.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParameterError(
            f'messages is {shown(messages)}; it must be a list of {{"role", "content"}} messages'
        )
    if not messages:
        raise InvalidParameterError("messages is empty; it must end with a user's message")
    told: list[Message] = []
    before = ""
    for place, item in enumerate(messages):
        message = _read_message(item, f"messages[{place}]", with_tools)
        if message.role not in MAY_FOLLOW[before]:
            after = f"after one of role {before!r}" if before else "at the beginning"
            raise InvalidParameterError(
                f"messages[{place}] has role {message.role!r}; {after} it must be "
                f"{' or '.join(MAY_FOLLOW[before])}"
            )
        before = "assistant with tool_calls" if message.calls else message.role
        told.append(message)
    last = told[-1].role
    if last not in ("user", "tool"):
        raise InvalidParameterError(
            f"messages[{len(told) - 1}] is the last one and has role {last!r}; "
            f"the last one must be {'user or tool' if with_tools else 'user'}"
        )
    return told


def questions_and_answers(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """A conversation for families that have no roles, only rounds.

    Returns:
        The questions, of which the last awaits its answer, and the answers to the others. A
        system message stands before the first question, with a line break between them.

    Raises:
        InvalidParameterError: as `read_messages` does.
    """
    told = read_messages(messages, with_tools=False)
    system = "".join(message.content for message in told if message.role == "system")
    questions = [message.content for message in told if message.role == "user"]
    if system:
        questions[0] = f"{system}\n{questions[0]}"
    return questions, [message.content for message in told if message.role == "assistant"]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checks tools in OpenAI's shape, `{"type": "function", "function": {"name", ...}}`.

    Returns:
        Their function objects, which JSON can write.

    Raises:
        InvalidParameterError: anything else; the message names its place.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidParameterError(f"tools is {shown(tools)}; it must be a list of functions")
    functions = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise InvalidParameterError(
                f'tools[{place}] is {shown(tool)}; it must be {{"type": "function", '
                '"function": {"name", "description", "parameters"}}'
            )
        _read_name(function, f"tools[{place}]['function']")
        try:
            write_json(function)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(
                f"tools[{place}]['function'] cannot be written as JSON: {error}"
            ) from None
        if levels(function) > DEEPEST:
            raise InvalidParameterError(
                f"tools[{place}]['function'] has {levels(function)} levels of lists and objects; "
                f"it may have {DEEPEST}"
            )
        functions.append(dict(function))
    return functions


def refuse_tools(tools: Sequence[Any], family: str) -> None:
    """Raises InvalidParameterError when tools are offered to a family that knows none."""
    if tools:
        raise InvalidParameterError(
            f"tools is {shown(tools)}; {family} was not trained on tools, so it must be empty"
        )


def _read_message(item: Any, name: str, with_tools: bool) -> Message:
    if not isinstance(item, Mapping):
        raise InvalidParameterError(
            f'{name} is {shown(item)}; it must be a {{"role", "content"}} message'
        )
    role, content = item.get("role"), item.get("content")
    roles = ("system", "user", "assistant", *(("tool",) if with_tools else ()))
    if role not in roles:
        raise InvalidParameterError(
            f"{name} has role {shown(role)}; it must be one of {', '.join(roles)}"
        )
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant" and item.get("tool_calls"):
        if not with_tools:
            raise InvalidParameterError(
                f"{name} has tool_calls; this model was not trained on tools, so it must have none"
            )
        calls = _read_calls(item["tool_calls"], f"{name}['tool_calls']")
        content = "" if content is None else content
    check_text(content, f"{name}['content']")
    return Message(str(role), str(content), calls)


def _read_calls(calls: Any, name: str) -> tuple[ToolCall, ...]:
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise InvalidParameterError(f"{name} is {shown(calls)}; it must be a list of calls")
    read = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidParameterError(
                f'{name}[{place}] is {shown(call)}; it must be {{"type": "function", '
                '"function": {"name", "arguments"}}'
            )
        where = f"{name}[{place}]['function']"
        arguments = function.get("arguments")
        check_text(arguments, f"{where}['arguments']")
        if read_json_arguments(str(arguments)) is None:
            raise InvalidParameterError(
                f"{where}['arguments'] is {shown(arguments)}; it must be the text of a JSON object "
                f"of at most {DEEPEST} levels"
            )
        read.append(ToolCall(_read_name(function, where), str(arguments)))
    return tuple(read)


def _read_name(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise InvalidParameterError(
            f"{where}['name'] is {shown(name)}; it must be the printable name of a function"
        )
    return name
