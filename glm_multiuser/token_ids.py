"""Prompts as validated token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from numbers import Integral

import numpy as np

from glm_multiuser.errors import InvalidParameterError, shown


class TokenIds(tuple[int, ...]):
    """A prompt of ints from 0 to `vocab_size` - 1, from a tokenizer or already validated.

    continued: whether it ends with the beginning of the answer.

    Raises:
        InvalidParameterError: an id beyond `vocab_size`; tokenizers may have more tokens.
    """

    vocab_size: int
    continued: bool

    def __new__(cls, ids: Iterable[int], vocab_size: int, continued: bool = False) -> TokenIds:
        checked = super().__new__(cls, ids)
        if max(checked, default=0) >= vocab_size:
            raise InvalidParameterError(
                f"prompt has token id {max(checked)}; those of this model are below {vocab_size}",
                field="prompt",
            )
        checked.vocab_size = vocab_size
        checked.continued = continued
        return checked


def check_token_ids(prompt: Sequence[int], vocab_size: int) -> TokenIds:
    """Validates the ids of a prompt; `TokenIds` are not checked again.

    Raises:
        InvalidParameterError: not a sequence, or an id that is not an int from 0 to
            `vocab_size` - 1.
    """
    if isinstance(prompt, TokenIds) and prompt.vocab_size == vocab_size:
        return prompt
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()  # a number if it has no dimensions
    # Bytes are sequences of ints, and would be taken for token ids. In Python 3.9, `array` is not a
    # Sequence.
    is_sequence = isinstance(prompt, (Sequence, array))
    if not is_sequence or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidParameterError(
            f"prompt is {shown(prompt)}; it must be a text or a sequence of token ids",
            field="prompt",
        )
    for position, token_id in enumerate(prompt):
        whole = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not whole or not 0 <= token_id < vocab_size:
            raise InvalidParameterError(
                f"prompt[{position}] is {shown(token_id)}; token ids are whole numbers from 0 to "
                f"{vocab_size - 1}",
                field="prompt",
            )
    return TokenIds(map(int, prompt), vocab_size)
