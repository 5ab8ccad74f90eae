"""Turning the ids of an answer into text while they arrive, and ending it at a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Optional

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.text import invalid, unfinished_match

BYTE_BY_BYTE = "glm_multiuser.byte_by_byte"
"""Name of the codec error handler that writes one U+FFFD per byte that is no UTF-8.

Python's own "replace" writes one for a whole unfinished character; sentencepiece does not.
"""


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd", error.start + 1


codecs.register_error(BYTE_BY_BYTE, _replace_one_byte)


class IncrementalDetokenizer:
    """The text of one answer, handed out as soon as it can no longer change.

    The deltas join to the same text however the ids are split over the calls of `push`; a
    character is never split, repeated or taken back. Only what is not yet certain waits: up to
    three bytes of an unfinished UTF-8 character, and the beginning of a text that one of
    `replacements` may change. So the work per id does not grow with the length of the answer.

    Args:
        token_bytes: the UTF-8 bytes that an id adds to the answer; called once per id, in
            order, so it may remember whether the answer has begun.
        errors: how bytes that are no UTF-8 are shown, an error handler of `codecs`.
        replacements: (old, new) pairs, applied to the whole text one after the other as
            `str.replace` would.
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
        """Takes the next ids and returns the text that is now final, often ""."""
        text = self._decoder.decode(b"".join(self._token_bytes(one) for one in token_ids))
        for replacement in self._replacements:
            text = replacement.feed(text)
        return text

    @property
    def inside_character(self) -> bool:
        """Whether the ids so far end inside a character, whose other bytes have yet to come."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Returns the rest, once no more ids will come."""
        text = self._decoder.decode(b"", True)
        for replacement in self._replacements:
            text = replacement.feed(text) + replacement.flush()
        return text


class _StreamReplace:
    """`str.replace` for a text that arrives in pieces."""

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
    """Cuts a text, which arrives in pieces, before the first stop string in it.

    The first stop string is the one that is complete first; of several that are complete at the
    same character, the longest. So the result depends on the text alone and not on how it was
    split into pieces, and no further text is needed to decide. Without any, all text passes.

    Attributes:
        found: the stop string that was found; None so far.

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

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns:
            The text that may be sent now, and whether a stop string has been found. After
            that, nothing more is ever returned.
        """
        if self.found is not None:
            return "", True
        known = self._held + text
        found = [(known.find(word), word) for word in self._stop]
        matches = [(start + len(word), start, word) for start, word in found if start >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return known[:start], True
        held = max((unfinished_match(known, word) for word in self._stop), default=0)
        self._held = known[len(known) - held :]
        return known[: len(known) - held], False

    def flush(self) -> str:
        """Returns what was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held
