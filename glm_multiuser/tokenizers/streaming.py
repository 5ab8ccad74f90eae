"""Incremental detokenisation and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Optional

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.text import invalid, unfinished_match

BYTE_BY_BYTE = "glm_multiuser.byte_by_byte"
"""Codec error handler that writes one U+FFFD per invalid byte, as sentencepiece does.

Python's "replace" writes one per unfinished character.
"""


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd", error.start + 1


codecs.register_error(BYTE_BY_BYTE, _replace_one_byte)


class IncrementalDetokenizer:
    """Decodes one answer incrementally and returns text once it is final.

    The deltas join to the same text however the ids are split over calls of `push`; a character
    is never split, repeated or retracted. Held back are only up to three bytes of an unfinished
    UTF-8 character and the start of a match of `replacements`, so the work per id does not grow
    with the length of the answer.

    Args:
        token_bytes: returns the UTF-8 bytes of an id; called once per id, in order, so it may
            keep state.
        errors: `codecs` error handler for bytes that are not UTF-8.
        replacements: (old, new) pairs, applied to the whole text in order, like `str.replace`.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        errors: str = "replace",
        replacements: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._replacements = [_StreamReplace(old, new) for old, new in replacements]

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next ids and returns the newly final text, often ""."""
        text = self._decoder.decode(b"".join(self._token_bytes(one) for one in token_ids))
        for replacement in self._replacements:
            text = replacement.feed(text)
        return text

    @property
    def inside_character(self) -> bool:
        """Whether the ids so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Returns the remaining text after the last id."""
        text = self._decoder.decode(b"", True)
        for replacement in self._replacements:
            text = replacement.feed(text) + replacement.flush()
        return text


class _StreamReplace:
    """`str.replace` for streamed text."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def feed(self, text: str) -> str:
        *changed, rest = (self._held + text).split(self._old)
        held = unfinished_match(rest, self._old)
        self._held = rest[len(rest) - held :]
        return self._new.join([*changed, rest[: len(rest) - held]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class StopStrings:
    """Truncates streamed text before its first stop string.

    The first stop string is the one that completes first; of several completing at the same
    character, the longest. So the result does not depend on how the text was split, and needs no
    lookahead. Without stop strings, all text passes.

    Attributes:
        found: the stop string found, or None so far.

    Raises:
        InvalidParameterError: a stop string that is empty or not a string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise InvalidParameterError(
                f"stop is the string {stop!r}; it must be a list of strings", field="stop"
            )
        for place, word in enumerate(stop):
            if not isinstance(word, str) or not word:
                raise invalid(f"stop[{place}]", word, "a string of at least one character", "stop")
        self._stop = tuple(stop)
        self.found: Optional[str] = None
        self._held = ""

    def feed(self, text: str, *, ends: bool = True) -> tuple[str, bool]:
        """Takes the next text.

        Args:
            ends: whether a stop string that is completed in this text ends the answer.

        Returns:
            The text that may be sent now, and whether a stop string was found. After that, the
            text is always empty.
        """
        if self.found is not None:
            return "", True
        known = self._held + text
        # One that lies in the held-back text was completed where it did not end the answer.
        first = len(self._held) + 1
        found = [(known.find(word, max(0, first - len(word))), word) for word in self._stop]
        matches = [(start + len(word), start, word) for start, word in found if start >= 0]
        if matches and ends:
            _, start, self.found = min(matches)
            self._held = ""
            return known[:start], True
        held = max((unfinished_match(known, word) for word in self._stop), default=0)
        self._held = known[len(known) - held :]
        return known[: len(known) - held], False

    def flush(self) -> str:
        """Returns the held-back text after the last delta."""
        held, self._held = self._held, ""
        return held
