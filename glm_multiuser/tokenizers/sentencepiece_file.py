"""Sentencepiece model files: ChatGLM-6B, ChatGLM2, ChatGLM3, and Llama 2 without tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union

import sentencepiece

from glm_multiuser.checkpoint.files import reading
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.added_tokens import read_added_tokens, words_of
from glm_multiuser.tokenizers.base import Vocabulary, encode_without_prefix
from glm_multiuser.tokenizers.folder import (
    ENDS,
    added_tokens_decoder,
    read_special_tokens,
    read_tokenizer_config,
)
from glm_multiuser.tokenizers.library import encode_words
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE

LLAMA_FILE = "tokenizer.model"

SPACE_MARK = "\u2581"
"""Stands for a space inside a piece."""

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class SentencePieceFile:
    """A sentencepiece model.

    Args:
        file: its path.
        content: of the model; None reads the file.

    Attributes:
        size: number of pieces.
        special_ids: ids of control symbols and the unknown piece, which text never encodes to.
        eos_id: id of the end-of-sequence symbol, -1 if the file has none.

    Raises:
        CheckpointError: a missing or broken file, or one without byte pieces.
    """

    def __init__(self, file: Union[str, Path], content: Optional[bytes] = None) -> None:
        self.file = Path(file)
        self._pieces = _load_pieces(self.file, content)
        self.size: int = self._pieces.get_piece_size()
        everything = list(range(self.size))
        kinds = zip(self._pieces.is_control(everything), self._pieces.is_unknown(everything))
        self.special_ids = frozenset(one for one, kind in enumerate(kinds) if any(kind))
        self.eos_id: int = self._pieces.eos_id()
        if not self._pieces.is_byte(self._pieces.piece_to_id("<0x00>")):
            raise CheckpointError(
                f"{file} has no byte pieces, so an unknown character would become <unk>; "
                "it must be trained with byte_fallback"
            )

    def vocabulary(self) -> Vocabulary:
        """Returns a vocabulary whose special tokens are the control symbols."""
        names: list[str] = self._pieces.id_to_piece(list(range(self.size)))
        pieces, first_pieces = bytes_of_pieces(
            {name: one for one, name in enumerate(names) if one not in self.special_ids}
        )
        # Reading the settings would need protobuf, so their effect is tested.
        two_spaces = self._pieces.decode([self._pieces.piece_to_id(SPACE_MARK)] * 2)
        return Vocabulary(
            self.encode,
            pieces,
            {names[one]: one for one in sorted(self.special_ids)},
            first_pieces=first_pieces if two_spaces != "  " else {},
            drops_every_leading_space=two_spaces == "",
            errors=BYTE_BY_BYTE,
        )

    def encode(self, text: str) -> list[int]:
        """Encodes text; names of control symbols become ordinary pieces."""
        ids: list[int] = self._pieces.encode(text)
        return ids

    def find(self, piece: str) -> Optional[int]:
        """Returns the id of a piece, or None."""
        # sentencepiece returns the id of <unk> for a missing piece.
        found: int = self._pieces.piece_to_id(piece)
        return found if self._pieces.id_to_piece(found) == piece else None

    def is_part(self, piece: str) -> bool:
        """Whether other pieces contain this one."""
        names: list[str] = self._pieces.id_to_piece(list(range(self.size)))
        return any(piece in name and piece != name for name in names)

    def need(self, piece: str, family: str) -> int:
        """Returns the id of a piece; raises CheckpointError if it is missing."""
        found = self.find(piece)
        if found is None:
            raise CheckpointError(f"{self.file} has no piece {piece!r}; {family} needs one")
        return found

    def refuse_as_text(self, piece: str) -> None:
        """Raises CheckpointError if text can encode to this special token."""
        found = self.find(piece)
        if found is not None and found not in self.special_ids:
            raise CheckpointError(
                f"{self.file} has {piece!r} as ordinary text, so a user could write this special "
                "token; it must be a control symbol"
            )


def bytes_of_pieces(ids: Mapping[str, int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Returns the bytes of each id, and those without the leading space of ids that have one."""
    pieces = {}
    for name, token_id in ids.items():
        byte = BYTE_PIECE.fullmatch(name)
        text = name.replace(SPACE_MARK, " ").encode("utf-8")
        pieces[token_id] = bytes.fromhex(byte.group(1)) if byte else text
    spaced = [one for name, one in ids.items() if name.startswith(SPACE_MARK)]
    return pieces, {one: pieces[one][1:] for one in spaced}


def read_llama_model(folder: Path) -> Vocabulary:
    """Reads `tokenizer.model` of Llama 2 or Mistral, with the settings of the folder.

    Added tokens are those of `added_tokens_decoder`. As in transformers, a space is prepended to
    each text, with `legacy` false only to the first one of a prompt, and with `add_prefix_space`
    false to none.

    Raises:
        CheckpointError: a missing or broken file, or a special token that users could write as
            text.
    """
    pieces = SentencePieceFile(folder / LLAMA_FILE)
    vocabulary = pieces.vocabulary()
    added = added_tokens_decoder(folder)
    special, shown, strips = read_added_tokens(added, pieces.file)
    names = read_special_tokens(folder)
    ends = {*ENDS, names.by_role.get("eos_token")}
    text = {
        name
        for name, token_id in special.items()
        if token_id not in pieces.special_ids and pieces.find(name) == token_id
        if name not in ends and pieces.is_part(name)
    }
    words = words_of(added, {*ENDS, *names.by_role.values(), *names.others}, text)
    ordinary = {*words, *text}
    for name, token_id in special.items():
        if name not in ordinary or pieces.find(name) != token_id:
            pieces.refuse_as_text(name)
    special = {name: one for name, one in special.items() if name not in ordinary}
    config = read_tokenizer_config(folder)
    first_only = config.get("legacy") is False
    first, later = pieces.encode, partial(encode_without_prefix, pieces.encode)
    if config.get("add_prefix_space") is False:
        first = later
        vocabulary = replace(vocabulary, first_pieces={}, drops_every_leading_space=False)

    def after_word(text: str) -> list[int]:
        return later(text) if first_only or text[:1] == " " else first(text)

    return replace(
        vocabulary,
        encode=encode_words(words, first, after_word),
        pieces={**vocabulary.pieces, **shown},
        special={**vocabulary.special, **special},
        encode_after_special=encode_words(words, later, later) if first_only else None,
        strips=strips,
    )


def _load_pieces(file: Path, content: Optional[bytes]) -> Any:
    if content is None:
        with reading(file):
            content = file.read_bytes()
    try:
        if content:
            return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CheckpointError(f"{file} is not a sentencepiece model: {error}") from error
    raise CheckpointError(f"{file} is empty; it must be a sentencepiece model")
