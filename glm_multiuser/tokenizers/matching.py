"""Finding words in a text that arrives in pieces."""

from __future__ import annotations


def unfinished_match(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`.

    Args:
        text: all that is known so far; it need not contain a match.
        word: a string of at least one character.

    Returns:
        The length of the longest suffix of `text` that is a beginning of `word`, but not all
        of it: 0 to `len(word) - 1`.
    """
    tail = text[len(text) - min(len(text), len(word) - 1) :]
    start = tail.find(word[0])
    while start >= 0 and not word.startswith(tail[start:]):
        start = tail.find(word[0], start + 1)
    return len(tail) - start if start >= 0 else 0
