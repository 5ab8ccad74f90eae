"""The two ways to write a conversation, brought into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.text import check_text, shown

ROLES = ("system", "user", "assistant")


def rounds_of(history: Optional[Sequence[Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Normalises a history to its system text and its finished rounds.

    Args:
        history: a sequence of (query, answer) pairs, of `{"role", "content"}` messages, or of
            both in turn; None means no history. A system message may only come first. Every
            user message is followed by its assistant message: the question that is open goes
            into the query, not into the history.

    Returns:
        The system text ("" when there is none) and the list of (query, answer) pairs.

    Raises:
        InvalidParameterError: an item that is none of these; the message names its place.
    """
    if history is None:
        return "", []
    if isinstance(history, (str, bytes, Mapping)) or not isinstance(history, Sequence):
        raise InvalidParameterError(
            f"history is {shown(history)}; it must be a list of (query, answer) pairs or of "
            '{"role", "content"} messages'
        )
    system = ""
    rounds: list[tuple[str, str]] = []
    question: Optional[str] = None
    for place, item in enumerate(history):
        name = f"history[{place}]"
        role, texts = _read_item(item, name)
        expected = ["assistant"] if question is not None else ["user", "pair"]
        if place == 0:
            expected.append("system")
        if role not in expected:
            raise InvalidParameterError(
                f"{name} is {_described(role)} in a place where only "
                f"{' or '.join(_described(one) for one in expected)} can stand"
            )
        if role == "system":
            system = texts[0]
        elif role == "user":
            question = texts[0]
        elif question is not None:
            rounds.append((question, texts[0]))
            question = None
        else:
            rounds.append((texts[0], texts[1]))
    if question is not None:
        raise InvalidParameterError(
            f"history[{len(history) - 1}] is a user message without an answer; "
            "an open question must be passed as the query"
        )
    return system, rounds


def messages_of(query: str, history: Optional[Sequence[Any]]) -> list[dict[str, str]]:
    """A question with its history (see `rounds_of`) as one list of messages.

    Raises:
        InvalidParameterError: a query that is not a string, or a history that is none.
    """
    check_text(query, "query")
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
                f"{name} has role {shown(role)}; it must be one of {', '.join(ROLES)}"
            )
        return str(role), [_text(item.get("content"), f"{name}['content']")]
    if isinstance(item, (str, bytes)) or not isinstance(item, Sequence) or len(item) != 2:
        raise InvalidParameterError(
            f"{name} is {shown(item)}; it must be a (query, answer) pair or a "
            '{"role", "content"} message'
        )
    return "pair", [_text(item[0], f"{name}[0]"), _text(item[1], f"{name}[1]")]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameterError(f"{name} is {shown(value)}; it must be a string")
    return value


def _described(role: str) -> str:
    return "a (query, answer) pair" if role == "pair" else f"a message of role {role!r}"
