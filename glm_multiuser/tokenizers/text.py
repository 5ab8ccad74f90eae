"""Checks of callers' text, and partial matching at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from glm_multiuser.errors import InvalidParameterError, shown

Objects = Sequence[Mapping[str, Any]]
"""JSON objects, such as messages and tools in OpenAI's shape."""


def check_text(text: object, name: str, field: Optional[str] = None) -> str:
    """Returns the value if it is text that UTF-8 can encode.

    Raises:
        InvalidParameterError: it is not. `field` is the field containing it, by default `name`.
    """
    field = field or name
    if not isinstance(text, str):
        raise InvalidParameterError(f"{name} is {type(text).__name__}; it must be a string", field)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{name} has {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair; it must be text that UTF-8 can write",
            field,
        ) from None
    return text


def check_list(value: object, name: str, items: str, field: str) -> None:
    """Raises InvalidParameterError unless the value is a sequence other than text or a mapping."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise invalid(name, value, f"a list of {items}", field)


def invalid(name: str, value: object, wanted: str, field: str) -> InvalidParameterError:
    """Returns the error for an invalid value."""
    return InvalidParameterError(f"{name} is {shown(value)}; it must be {wanted}", field)


def unfinished_match(text: str, word: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `word`.

    0 to `len(word) - 1`.
    """
    tail = text[len(text) - min(len(text), len(word) - 1) :]
    start = tail.find(word[0])
    while start >= 0 and not word.startswith(tail[start:]):
        start = tail.find(word[0], start + 1)
    return len(tail) - start if start >= 0 else 0
