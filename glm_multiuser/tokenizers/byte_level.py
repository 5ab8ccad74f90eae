"""Vocabularies whose pieces are bytes, as GLM-4 and Qwen2 have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm_multiuser.tokenizers.streaming import IncrementalDetokenizer
from glm_multiuser.tokenizers.text import check_text


@dataclass(frozen=True)
class ByteVocabulary:
    """The pieces of a file.

    Attributes:
        encode: ids of a text, none of them in `special`.
        pieces: what an id says inside an answer; those that say nothing are not in here.
        special: ids that no text becomes, by name. Some have a piece (such as `<tool_call>` of
            Qwen2.5): an answer shows them.
    """

    encode: Callable[[str], list[int]]
    pieces: Mapping[int, bytes]
    special: Mapping[str, int]


class ByteLevelTokenizer:
    """Text to ids and back, without any form of a chat.

    The object is never changed after its construction: any number of threads may use it.

    Attributes:
        vocab_size: one more than the highest id; a model's vocabulary may be padded.
        special: id of each token that no text becomes.
    """

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self.special = vocabulary.special
        self._names = {
            token_id: name.encode("utf-8") for name, token_id in vocabulary.special.items()
        }
        self.vocab_size = 1 + max([*vocabulary.pieces, *vocabulary.special.values()])

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, without anything added; no text becomes a special token.

        Raises:
            InvalidParameterError: not a string, or half of a surrogate pair in it.
        """
        check_text(text, "text")
        return self._vocabulary.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer; special tokens, and ids beyond the vocabulary, stand for no text."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What one id says by itself: its bytes inside an answer, or a special token's name.

        An id beyond the vocabulary says nothing.
        """
        return self._names.get(token_id) or self._vocabulary.pieces.get(token_id, b"")

    def detokenizer(self) -> IncrementalDetokenizer:
        """A detokenizer for one answer; its deltas join to what `decode` returns."""
        pieces = self._vocabulary.pieces
        return IncrementalDetokenizer(lambda token_id: pieces.get(int(token_id), b""))
