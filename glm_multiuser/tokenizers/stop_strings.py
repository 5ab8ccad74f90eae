"""Ending an answer at a string that the caller named."""

from __future__ import annotations

from collections.abc import Sequence

from glm_multiuser.errors import InvalidParameterError
from glm_multiuser.tokenizers.matching import unfinished_match


class StopStrings:
    """Cuts a text, which arrives in pieces, before the first stop string in it.

    The first stop string is the one that is complete first; of several that are complete at the
    same character, the longest. So the result depends on the text alone and not on how it was
    split into pieces, and no further text is needed to decide.

    Args:
        stop: the stop strings; may be empty, then all text passes at once.

    Raises:
        InvalidParameterError: a stop string that is empty or not a string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise InvalidParameterError(
                f"stop is the string {stop!r}; it must be a list of strings"
            )
        for place, word in enumerate(stop):
            if not isinstance(word, str) or not word:
                raise InvalidParameterError(
                    f"stop[{place}] is {word!r}; it must be a string of at least one character"
                )
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns:
            The text that may be sent now, and whether a stop string has been found. After
            that, nothing more is ever returned.
        """
        if self._stopped:
            return "", True
        known = self._held + text
        found = [(known.find(word), len(word)) for word in self._stop]
        matches = [(start + length, start) for start, length in found if start >= 0]
        if matches:
            _, start = min(matches)
            self._stopped = True
            self._held = ""
            return known[:start], True
        held = max((unfinished_match(known, word) for word in self._stop), default=0)
        self._held = known[len(known) - held :]
        return known[: len(known) - held], False

    def flush(self) -> str:
        """Returns what was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held
