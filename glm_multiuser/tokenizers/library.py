"""The library tokenizers: encodes texts, and words between them that are added tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

LONG_TEXT = 4096
"""In characters."""

Encode = Callable[[str], list[int]]


def encoding(tokenizer: Tokenizer, text: str) -> Encoding:
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False)
    # `encode` holds the GIL for the whole text, a second per million characters; `encode_batch`
    # does not, but starts threads.
    (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoded


def with_words(words: Mapping[str, Mapping[str, Any]], encode: Encode) -> Encode:
    """Encodes words that are added tokens, and the text between them with `encode`."""
    if not words:
        return encode
    ids_of = {name: int(one["id"]) for name, one in words.items()}
    finder = Tokenizer(BPE())  # without a vocabulary, so it finds nothing else
    finder.add_tokens(
        [
            AddedToken(name, single_word=one.get("single_word") is True, normalized=False)
            for name, one in words.items()
        ]
    )

    def encode_parts(text: str) -> list[int]:
        ids: list[int] = []
        found, end = encoding(finder, text), 0
        for name, (start, stop) in zip(found.tokens, found.offsets):
            ids += [*encode(text[end:start]), ids_of[name]]
            end = stop
        return ids + encode(text[end:])

    return encode_parts
