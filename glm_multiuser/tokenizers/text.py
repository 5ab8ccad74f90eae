"""What every tokenizer checks about the texts that callers hand in."""

from __future__ import annotations

from glm_multiuser.errors import InvalidParameterError


def check_text(text: object, name: str) -> None:
    """Raises InvalidParameterError for a value that is no text, or that UTF-8 cannot write."""
    if not isinstance(text, str):
        raise InvalidParameterError(f"{name} is {type(text).__name__}; it must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{name} has {text[error.start]!r} at character {error.start}, half of a surrogate "
            "pair; it must be text that UTF-8 can write"
        ) from None


def shown(value: object, longest: int = 60) -> str:
    """The value for a message, cut so that a large one does not fill the log."""
    text = repr(value)
    return text if len(text) <= longest else text[:longest] + "..."
