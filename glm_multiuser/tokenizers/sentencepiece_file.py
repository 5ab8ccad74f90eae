"""A sentencepiece model file: what ChatGLM-6B, ChatGLM2 and ChatGLM3 have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Union

import sentencepiece

from glm_multiuser.errors import CheckpointError

SPACE_MARK = "\u2581"
"""How sentencepiece writes a space inside a piece."""


class SentencePieceFile:
    """The pieces of a file, and what each of them says.

    Args:
        file: a sentencepiece model with byte pieces.

    Attributes:
        file: as given.
        size: number of pieces.
        special_ids: ids of control symbols and of the unknown piece: no text becomes one.
        eos_id: id of the symbol that ends a text, -1 when the file has none.
        drops_a_leading_space: whether decoding drops a space at the beginning of a text.
        drops_every_leading_space: whether it drops all of them.

    Raises:
        CheckpointError: a file that is missing, broken or without byte pieces.
    """

    def __init__(self, file: Union[str, Path]) -> None:
        self.file = Path(file)
        self._pieces = _load_pieces(self.file)
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
        # A file says by its settings how many leading spaces decoding drops; the settings
        # themselves cannot be read without protobuf, their effect can.
        two_spaces = self._pieces.decode([self._pieces.piece_to_id(SPACE_MARK)] * 2)
        self.drops_a_leading_space = two_spaces != "  "
        self.drops_every_leading_space = two_spaces == ""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control symbols in it are spelled with ordinary pieces."""
        ids: list[int] = self._pieces.encode(text)
        return ids

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

    def name(self, token_id: int) -> bytes:
        """How the file calls a piece, in UTF-8."""
        name: str = self._pieces.id_to_piece(token_id)
        return name.encode("utf-8")

    def bytes_of(self, token_id: int, at_start: bool) -> bytes:
        """What a piece that is no special token says.

        Args:
            token_id: 0 to `size` - 1.
            at_start: whether a space at its beginning is dropped.
        """
        piece: str = self._pieces.id_to_piece(token_id)
        if self._pieces.is_byte(token_id):
            return bytes.fromhex(piece[len("<0x") : -len(">")])
        if at_start and piece.startswith(SPACE_MARK):
            piece = piece[len(SPACE_MARK) :]
        return piece.replace(SPACE_MARK, " ").encode("utf-8")


def _load_pieces(file: Path) -> Any:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        if content:
            return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CheckpointError(f"{file} is not a sentencepiece model: {error}") from error
    raise CheckpointError(f"{file} is empty; it must be a sentencepiece model")
