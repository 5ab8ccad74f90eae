"""GLM-4's `tokenizer.model`: a tiktoken rank file."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from glm_multiuser.checkpoint.files import reading
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.base import Vocabulary

FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenisation, from tokenization_chatglm.py of glm-4-9b; the same as Llama 3's."""

LONG_SPACE = re.compile(r"\s{50000}")
"""tiktoken overflows its stack on a run of a million spaces, so long runs are split here."""


def is_tiktoken_file(file: Path) -> bool:
    """Whether the file starts with ranks, unlike a sentencepiece model.

    Raises:
        CheckpointError: an unreadable file.
    """
    with reading(file), file.open("rb") as stream:
        return FIRST_LINE.match(stream.readline(1000)) is not None


def read_tiktoken_file(file: Path, special_tokens: Sequence[str]) -> Vocabulary:
    """Reads lines of a base64 piece, a space, and its rank, which is its id.

    The ids of the special tokens follow the last rank.

    Raises:
        CheckpointError: an unreadable file, a malformed line, ranks other than 0, 1, 2 ..., or a
            single byte without a piece.
    """
    with reading(file):
        lines = file.read_bytes().splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"{file} line {number} is not a piece in base64 and its rank: {error}"
            ) from None
    pieces = {rank: piece for piece, rank in ranks.items()}
    if sorted(pieces) != list(range(len(lines))):
        raise CheckpointError(f"{file} has {len(lines)} lines; their ranks must be 0, 1, 2 ...")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise CheckpointError(f"{file} has no piece for the byte {byte}; it must have all 256")
    encoding = tiktoken.Encoding(
        file.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for end in [*(run.end() for run in LONG_SPACE.finditer(text)), len(text)]:
            ids += encoding.encode_ordinary(text[start:end])
            start = end
        return ids

    special = {name: len(lines) + place for place, name in enumerate(special_tokens)}
    return Vocabulary(encode, pieces, special)
