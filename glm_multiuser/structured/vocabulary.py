"""A tokenizer's vocabulary as llguidance wants it."""

from __future__ import annotations

from functools import cached_property
from typing import Union

from glm_multiuser.tokenizers import ChatTokenizer


class Vocabulary:
    """A vocabulary in llguidance's format, with one more token for the end of an answer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        self.tokens = [*tokenizer.token_table(vocab_size), b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [
            vocab_size,
            *(one for one in tokenizer.special_ids if one < vocab_size),
        ]
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.tokens))

    @cached_property
    def ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        ordinary = [at for at in range(len(self.tokens)) if at not in special]
        return {self.tokens[at]: at for at in reversed(ordinary)}

    def __call__(self, written: Union[str, bytes]) -> list[int]:
        """Returns the tokenizer's ids if they are exactly this text, else the longest matches."""
        content = written.encode("utf-8") if isinstance(written, str) else bytes(written)
        ids = self._tokenizer.encode_inside(content.decode("utf-8"))
        if b"".join(self.tokens[one] for one in ids) == content:
            return ids
        ids = []
        while content:
            lengths = range(min(self._longest, len(content)), 0, -1)
            length = next((one for one in lengths if content[:one] in self.ids), 0)
            if not length:
                raise ValueError(f"the vocabulary has no token for {content[:1]!r}")
            ids.append(self.ids[content[:length]])
            content = content[length:]
        return ids
