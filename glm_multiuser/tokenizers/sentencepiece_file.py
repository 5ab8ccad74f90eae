"""Sentencepiece model files: ChatGLM-6B, ChatGLM2, ChatGLM3, and Llama 2 without tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import sentencepiece

from glm_multiuser.checkpoint.files import reading
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.base import NEVER_MERGED, Vocabulary
from glm_multiuser.tokenizers.folder import (
    added_tokens_decoder,
    read_added_tokens,
    read_tokenizer_config,
)
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE

LLAMA_FILE = "tokenizer.model"

SPACE_MARK = "\u2581"
"""How sentencepiece writes a space inside a piece."""

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class SentencePieceFile:
    """The pieces of a sentencepiece model.

    Args:
        file: where it is.
        content: of the model; None: what is in the file.

    Attributes:
        size: number of pieces.
        special_ids: ids of control symbols and of the unknown piece: no text becomes one.
        eos_id: id of the symbol that ends a text, -1 when the file has none.

    Raises:
        CheckpointError: a file that is missing, broken or without byte pieces.
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
        """The file as a vocabulary, whose special tokens are its control symbols."""
        names: list[str] = self._pieces.id_to_piece(list(range(self.size)))
        pieces, first_pieces = bytes_of_pieces(
            {name: one for one, name in enumerate(names) if one not in self.special_ids}
        )
        # The settings of a file cannot be read without protobuf, but their effect can be seen.
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
        """Ids of a text; control symbols in it are spelled with ordinary pieces."""
        ids: list[int] = self._pieces.encode(text)
        return ids

    def encode_without_prefix(self, text: str) -> list[int]:
        """Ids of a text, without the space that the file may put before it."""
        return self.encode(NEVER_MERGED + text)[len(self.encode(NEVER_MERGED)) :]

    def find(self, piece: str) -> Optional[int]:
        """The id of a piece, None when there is no such piece."""
        # sentencepiece answers with the id of <unk> when there is no such piece.
        found: int = self._pieces.piece_to_id(piece)
        return found if self._pieces.id_to_piece(found) == piece else None

    def need(self, piece: str, family: str) -> int:
        """The id of a piece that the family cannot do without."""
        found = self.find(piece)
        if found is None:
            raise CheckpointError(f"{self.file} has no piece {piece!r}; {family} needs one")
        return found

    def refuse_as_text(self, piece: str) -> None:
        """Raises CheckpointError when the file reads a special token's name in a text as it."""
        found = self.find(piece)
        if found is not None and found not in self.special_ids:
            raise CheckpointError(
                f"{self.file} has {piece!r} as ordinary text, so a user could write this special "
                "token; it must be a control symbol"
            )


def bytes_of_pieces(ids: Mapping[str, int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The bytes of each id, and of those that begin with a space the bytes without it."""
    pieces = {}
    for name, token_id in ids.items():
        byte = BYTE_PIECE.fullmatch(name)
        text = name.replace(SPACE_MARK, " ").encode("utf-8")
        pieces[token_id] = bytes.fromhex(byte.group(1)) if byte else text
    spaced = [one for name, one in ids.items() if name.startswith(SPACE_MARK)]
    return pieces, {one: pieces[one][1:] for one in spaced}


def read_llama_model(folder: Path) -> Vocabulary:
    """Reads `tokenizer.model` of Llama 2 or Mistral, with the settings of the folder.

    Added tokens come from `added_tokens_decoder` of `tokenizer_config.json`. As in transformers,
    a space is put before each text, with `legacy` false only before the first one of a prompt.

    Raises:
        CheckpointError: a file that is missing or broken, or in which a user could write a
            special token as text.
    """
    pieces = SentencePieceFile(folder / LLAMA_FILE)
    vocabulary = pieces.vocabulary()
    added, shown, strips = read_added_tokens(added_tokens_decoder(folder), pieces.file)
    for name in added:
        pieces.refuse_as_text(name)
    first_only = read_tokenizer_config(folder).get("legacy") is False
    return replace(
        vocabulary,
        pieces={**vocabulary.pieces, **shown},
        special={**vocabulary.special, **added},
        encode_after_special=pieces.encode_without_prefix if first_only else None,
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
