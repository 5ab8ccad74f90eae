"""The library tokenizers: encodes texts, and words between them that are added tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

LONG_TEXT = 4096
"""In characters."""

Encode = Callable[[str], list[int]]

Words = Mapping[str, Mapping[str, Any]]
"""Added tokens by name."""


def encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False)
    # `encode` holds the GIL for the whole text, a second per million characters; `encode_batch`
    # does not, but starts threads.
    (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoded


def encode_words(words: Words, first: Encode, later: Encode) -> Encode:
    """Encodes words that are added tokens, and the text before and after the first of them."""
    if not words:
        return first
    ids_of = {name: int(one["id"]) for name, one in words.items()}
    finder = Tokenizer(BPE())  # without a vocabulary, so it finds nothing else
    finder.add_tokens(
        [
            AddedToken(name, single_word=one.get("single_word") is True, normalized=False)
            for name, one in words.items()
        ]
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        encode_part, end = first, 0
        found = encoding(finder, text)
        for name, (start, stop) in zip(found.tokens, found.offsets):
            ids += [*encode_part(text[end:start]), ids_of[name]]
            encode_part, end = later, stop
        return ids + encode_part(text[end:])

    return encode
