"""Validates conversations and tools in OpenAI's format, and histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from glm_multiuser.errors import InvalidParameterError, shown
from glm_multiuser.tokenizers.calls import (
    DEEPEST,
    ToolCall,
    levels,
    read_json_arguments,
    write_json,
)
from glm_multiuser.tokenizers.text import Objects, check_list, check_text, invalid

ROLES = ("system", "user", "assistant")
MESSAGE = '{"role", "content"} message'


@dataclass(frozen=True)
class Message:
    """One message, of role "system", "user", "assistant" or "tool" (a tool's result)."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()


def read_messages(
    messages: Objects, continue_final_message: bool = False, *, with_tools: bool
) -> list[Message]:
    """Validates a conversation.

    Roles may come in any order, but a tool's result must follow a call.

    Args:
        messages: `{"role", "content"}`; an assistant message may have `tool_calls`, and then its
            content may be None.
        continue_final_message: whether the last message starts the answer; then it must be an
            assistant's without calls.
        with_tools: whether the family supports tools; otherwise messages with them are rejected.

    Raises:
        InvalidParameterError: anything else; the message names the position.
    """
    check_list(messages, "messages", f"{MESSAGE}s", "messages")
    if not messages:
        raise InvalidParameterError(
            "messages is empty; it must have at least one message", field="messages"
        )
    conversation: list[Message] = []
    for place, item in enumerate(messages):
        message = _read_message(item, f"messages[{place}]", with_tools)
        before = conversation[-1] if conversation else None
        if message.role == "tool" and not (before and (before.calls or before.role == "tool")):
            raise InvalidParameterError(
                f"messages[{place}] has role 'tool'; it must follow an assistant's message with "
                "tool_calls, or another one of role 'tool'",
                field="messages",
            )
        conversation.append(message)
    last = conversation[-1]
    if continue_final_message and (last.role != "assistant" or last.calls):
        raise InvalidParameterError(
            f"messages[{len(conversation) - 1}] is the last one and has role {last.role!r}"
            f"{' and tool_calls' if last.calls else ''}; with continue_final_message it must be "
            "an assistant's message without tool_calls",
            field="messages",
        )
    return conversation


def questions_and_answers(
    messages: Objects, continue_final_message: bool = False
) -> tuple[list[str], list[str]]:
    """Converts a conversation to rounds of question and answer, for families without roles.

    Consecutive messages of one role are joined by a blank line. A system message is prepended to
    the next question, with a line break. An answer without a question gets an empty one.

    Returns:
        The questions, and the answers to all but the last one; with `continue_final_message` also
        the start of the last answer.

    Raises:
        InvalidParameterError: as `read_messages`.
    """
    questions: list[str] = []
    answers: list[str] = []
    before = "assistant"
    for message in read_messages(messages, continue_final_message, with_tools=False):
        if message.role == "system" and not message.content:
            continue
        is_answer = message.role == "assistant"
        if is_answer and not questions:
            questions.append("")
        texts = answers if is_answer else questions
        if texts and is_answer == (before == "assistant"):
            texts[-1] += ("\n" if before == "system" else "\n\n") + message.content
        else:
            texts.append(message.content)
        before = message.role
    if before == "assistant" and not continue_final_message:
        questions.append("")
    return questions, answers


def read_tools(tools: Objects) -> list[dict[str, Any]]:
    """Validates tools in OpenAI's format, `{"type": "function", "function": {"name", ...}}`.

    Returns:
        Their function objects, all serialisable as JSON.

    Raises:
        InvalidParameterError: anything else; the message names the position.
    """
    check_list(tools, "tools", "functions", "tools")
    functions = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            wanted = '{"type": "function", "function": {"name", "description", "parameters"}}'
            raise invalid(f"tools[{place}]", tool, wanted, "tools")
        where = f"tools[{place}]['function']"
        _read_name(function, where, "tools")
        try:
            write_json(function)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(
                f"{where} cannot be written as JSON: {error}", field="tools"
            ) from None
        if levels(function) > DEEPEST:
            raise InvalidParameterError(
                f"{where} has {levels(function)} levels of lists and objects; "
                f"it may have {DEEPEST}",
                field="tools",
            )
        functions.append(dict(function))
    return functions


def refuse_tools(tools: Sequence[Any], family: str) -> None:
    """Raises InvalidParameterError for tools passed to a family without tool support."""
    if tools:
        raise InvalidParameterError(
            f"tools is {shown(tools)}; {family} was not trained on tools, so it must be empty",
            field="tools",
        )


def _read_message(item: Any, name: str, with_tools: bool) -> Message:
    if not isinstance(item, Mapping):
        raise invalid(name, item, f"a {MESSAGE}", "messages")
    role, content = item.get("role"), item.get("content")
    roles = (*ROLES, "tool") if with_tools else ROLES
    if role not in roles:
        raise InvalidParameterError(
            f"{name} has role {shown(role)}; it must be one of {', '.join(roles)}",
            field="messages",
        )
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant" and item.get("tool_calls"):
        if not with_tools:
            raise InvalidParameterError(
                f"{name} has tool_calls; this model was not trained on tools, so it must have none",
                field="messages",
            )
        calls = _read_calls(item["tool_calls"], f"{name}['tool_calls']")
        content = "" if content is None else content
    return Message(str(role), check_text(content, f"{name}['content']", "messages"), calls)


def _read_calls(calls: Any, name: str) -> tuple[ToolCall, ...]:
    check_list(calls, name, "calls", "messages")
    read = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            wanted = '{"type": "function", "function": {"name", "arguments"}}'
            raise invalid(f"{name}[{place}]", call, wanted, "messages")
        where = f"{name}[{place}]['function']"
        arguments = check_text(function.get("arguments"), f"{where}['arguments']", "messages")
        arguments = arguments or "{}"  # clients write calls without arguments either way
        if read_json_arguments(arguments) is None:
            wanted = f"the text of a JSON object of at most {DEEPEST} levels"
            raise invalid(f"{where}['arguments']", arguments, wanted, "messages")
        read.append(ToolCall(_read_name(function, where, "messages"), arguments))
    return tuple(read)


def _read_name(function: Mapping[str, Any], where: str, field: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise invalid(f"{where}['name']", name, "the printable name of a function", field)
    return name


def rounds_of(history: Optional[Sequence[Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Normalises a history to its system text and its finished rounds.

    Args:
        history: a sequence of (query, answer) pairs, `{"role", "content"}` messages, or both
            mixed; None means no history. A system message may only come first. Every user message
            must be followed by its assistant message: the open question is passed as the query.

    Returns:
        The system text ("" if there is none) and the list of (query, answer) pairs.

    Raises:
        InvalidParameterError: any other item; the message names its position.
    """
    if history is None:
        return "", []
    check_list(history, "history", f"(query, answer) pairs or of {MESSAGE}s", "history")
    system = question = ""
    rounds: list[tuple[str, str]] = []
    expected = ["user", "pair", "system"]
    for place, item in enumerate(history):
        name = f"history[{place}]"
        role, texts = _read_item(item, name)
        if role not in expected:
            raise InvalidParameterError(
                f"{name} is {_described(role)} in a place where only "
                f"{' or '.join(map(_described, expected))} is valid",
                field="history",
            )
        if role == "system":
            system = texts[0]
        elif role == "user":
            question = texts[0]
        else:
            rounds.append((texts[0] if role == "pair" else question, texts[-1]))
        expected = ["assistant"] if role == "user" else ["user", "pair"]
    if expected == ["assistant"]:
        raise InvalidParameterError(
            f"history[{len(history) - 1}] is a user message without an answer; "
            "an open question must be passed as the query",
            field="history",
        )
    return system, rounds


def messages_of(query: str, history: Optional[Sequence[Any]]) -> list[dict[str, str]]:
    """Converts a query and its history (see `rounds_of`) to one list of messages.

    Raises:
        InvalidParameterError: a query that is not a string, or an invalid history.
    """
    check_text(query, "prompt")
    system, rounds = rounds_of(history)
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in rounds:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": query}]


def _read_item(item: Any, name: str) -> tuple[str, list[str]]:
    """Returns the role ("pair" for a pair) and the one or two texts of an item."""
    if isinstance(item, Mapping):
        role = item.get("role")
        if role not in ROLES:
            raise InvalidParameterError(
                f"{name} has role {shown(role)}; it must be one of {', '.join(ROLES)}",
                field="history",
            )
        return str(role), [_text(item.get("content"), f"{name}['content']")]
    if isinstance(item, (str, bytes)) or not isinstance(item, Sequence) or len(item) != 2:
        raise invalid(name, item, f"a (query, answer) pair or a {MESSAGE}", "history")
    return "pair", [_text(one, f"{name}[{place}]") for place, one in enumerate(item)]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, value, "a string", "history")
    return check_text(value, name, "history")


def _described(role: str) -> str:
    return "a (query, answer) pair" if role == "pair" else f"a message of role {role!r}"
