"""BPE vocabularies of the library tokenizers: `tokenizer.json`, or its older files.

Two kinds are supported: byte-level (Llama 3, Qwen, GLM-4, SmolLM2), whose pieces are bytes, and
sentencepiece's (Llama 2, TinyLlama, Mistral), whose pieces are characters, with byte fallback.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Optional

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from glm_multiuser.checkpoint.files import read_json_object, read_text
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.added_tokens import (
    Declared,
    read_added_tokens,
    text_among,
    with_declared,
    without_merges_of,
    words_of,
)
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.folder import (
    ENDS,
    added_tokens_decoder,
    read_special_tokens,
    read_tokenizer_config,
)
from glm_multiuser.tokenizers.library import Encode, Words, encode_words, encoding
from glm_multiuser.tokenizers.sentencepiece_file import SPACE_MARK, bytes_of_pieces
from glm_multiuser.tokenizers.streaming import BYTE_BY_BYTE

VOCABULARY_FILE = "tokenizer.json"
OLDER_FILES = ("vocab.json", "merges.txt")
OLDER_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
"""Classes whose older files are read; those of others have another pre-tokenisation."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenisation, from tokenization_qwen2.py of transformers."""


def read_hugging_face_files(folder: Path) -> Vocabulary:
    """Reads `tokenizer.json`, or else `vocab.json`, `merges.txt` and `tokenizer_config.json`.

    Raises:
        CheckpointError: a missing file, or as `vocabulary_of`.
    """
    names = read_special_tokens(folder)
    declared: Declared = [*added_tokens_decoder(folder), *names.by_role.values(), *names.others]
    ends = (names.by_role.get("eos_token", ""), *ENDS)
    file = folder / VOCABULARY_FILE
    if file.exists():
        return vocabulary_of(read_json_object(file), file, declared, ends)
    return vocabulary_of(_older_content(folder), folder / OLDER_FILES[0], declared, ends)


def vocabulary_of(
    content: Mapping[str, Any],
    file: Path,
    declared: Declared = (),
    ends: Collection[str] = ENDS,
) -> Vocabulary:
    """Builds a vocabulary from the content of a `tokenizer.json`.

    Args:
        declared: by other files.
        ends: names of the tokens that end answers. Other added tokens that are ordinary pieces
            stay ordinary text.

    Raises:
        CheckpointError: broken content, an unsupported kind of vocabulary, or a special token
            that users could write as text.
    """
    try:
        model, decoder = content["model"], json.dumps(content.get("decoder"))
        ids = {str(piece): int(token_id) for piece, token_id in model["vocab"].items()}
        # Newer files have merges as pairs, which older versions of the library cannot read.
        merges: list[list[str]] = [
            one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]
        ]
        added = with_declared(content["added_tokens"], declared, ids, merges, file)
        pre_tokenizer = json.dumps(content.get("pre_tokenizer"))
        byte_level = "ByteLevel" in decoder and "ByteLevel" in pre_tokenizer
        text = text_among(added, ids, merges) - {*ends}
        names = {*ends, *(one for one in declared if isinstance(one, str))}
        words = words_of(added, names, text)
        added = [one for one in added if one.get("content") not in text or one["content"] in words]
        special, shown, strips = read_added_tokens(added, file)
        special = {name: one for name, one in special.items() if name not in words}
        special_ids = set(special.values())
        reserved = {piece for piece, token_id in ids.items() if token_id in special_ids}
        merges = without_merges_of(reserved, merges, file)
        ordinary = {piece: one for piece, one in ids.items() if piece not in reserved}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a BPE vocabulary: {error!r}") from None
    model = {**model, "merges": [" ".join(pair) for pair in merges], "unk_token": None}
    if byte_level:
        encode = _byte_level_encoder(content, model, ordinary, file)
        pieces = {**_byte_level_pieces(ordinary), **shown}
        return Vocabulary(encode_words(words, encode, encode), pieces, special, strips=strips)
    if not (model.get("byte_fallback") and "ByteFallback" in decoder):
        raise CheckpointError(
            f"{file} has model {model.get('type')!r} and decoder {content.get('decoder')!r}; this "
            "version reads 'BPE' with a decoder 'ByteLevel', or 'ByteFallback' and byte_fallback"
        )
    for byte in range(256):
        if f"<0x{byte:02X}>" not in ordinary:
            raise CheckpointError(f"{file} has no piece '<0x{byte:02X}>'; it must have all bytes")
    encode, encode_after_special = _sentencepiece_encoders(content, model, file, words)
    pieces, first_pieces = bytes_of_pieces(ordinary)
    return Vocabulary(
        encode,
        {**pieces, **shown},
        special,
        first_pieces=first_pieces if '"Strip"' in decoder else {},
        errors=BYTE_BY_BYTE,
        encode_after_special=encode_after_special,
        strips=strips,
    )


def _load(content: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> Tokenizer:
    # Without added tokens, their names are ordinary text. Older versions of the library lack
    # ignore_merges, so it is implemented here.
    plain = {
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": content.get("pre_tokenizer"),
        "model": {**model, "ignore_merges": False},
    }
    try:
        return Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{file} cannot be read by tokenizers: {error}") from None


def _encoder(tokenizer: Tokenizer) -> Encode:
    def encode(text: str) -> list[int]:
        ids: list[int] = encoding(tokenizer, text).ids
        return ids

    return encode


def _byte_level_encoder(
    content: Mapping[str, Any], model: Mapping[str, Any], ordinary: Mapping[str, int], file: Path
) -> Encode:
    """Encodes with `model`; with its `ignore_merges`, words that are pieces skip the merges."""
    if not model.get("ignore_merges"):
        return _encoder(_load(content, model, file))
    # With a piece for each byte, the pieces of a word join to it.
    end = max(model["vocab"].values(), default=-1) + 1
    missing = {one: end + place for place, one in enumerate({*ByteLevel.alphabet()} - {*ordinary})}
    tokenizer = _load(content, {**model, "vocab": {**model["vocab"], **missing}}, file)

    def encode(text: str) -> list[int]:
        encoded = encoding(tokenizer, text)
        ids: list[int] = []
        tokens = zip(encoded.word_ids, encoded.tokens, encoded.ids)
        for _, word in groupby(tokens, itemgetter(0)):
            _, pieces, piece_ids = zip(*word)
            whole = ordinary.get("".join(pieces))
            ids += piece_ids if whole is None else [whole]
        return [one for one in ids if one < end] if missing else ids

    return encode


def _sentencepiece_encoders(
    content: Mapping[str, Any], model: Mapping[str, Any], file: Path, words: Words
) -> tuple[Encode, Optional[Encode]]:
    """Returns the encoder of text, and that of text after a special token if it differs.

    Spaces are marked here, because the library's normalizer `Replace` takes quadratic time, and
    older versions lack settings of the pre-tokenizer `Metaspace`.
    """
    normalizer = content.get("normalizer") or None
    steps = _simple_steps(normalizer)
    rest = {**content, "normalizer": normalizer if steps is None else None, "pre_tokenizer": None}
    merge = _encoder(_load(rest, model, file))
    metaspace = content.get("pre_tokenizer") or None

    def normalized(text: str) -> str:
        for old, new in (steps or ()) if text else ():
            text = new + text if old is None else text.replace(old, new)
        return text

    # As in the library, which finds such words, with a space before them, in normalized text.
    spaced = [
        name for name, one in words.items() if steps and not metaspace and one.get("normalized")
    ]
    spaced_words = {normalized(name): words[name] for name in spaced}
    words = {name: one for name, one in words.items() if name not in spaced}
    merge = encode_words(spaced_words, merge, merge)

    def encode(text: str) -> list[int]:
        return merge(normalized(text))

    if metaspace is None:
        return encode_words(words, encode, encode), None
    is_metaspace = isinstance(metaspace, dict) and metaspace.get("type") == "Metaspace"
    if not is_metaspace or metaspace.get("split", True):
        raise CheckpointError(
            f"{file} has pre_tokenizer {metaspace!r}; with byte_fallback this version reads none, "
            "or 'Metaspace' with split false"
        )

    def marked(text: str) -> list[int]:
        return encode(text.replace(" ", SPACE_MARK))

    def prefixed(text: str) -> list[int]:
        return marked(text if text[:1] in ("", " ", SPACE_MARK) else SPACE_MARK + text)

    scheme = metaspace.get("prepend_scheme", "always")
    first = marked if scheme == "never" else prefixed
    later = encode_words(words, marked, marked) if scheme == "first" else None
    return encode_words(words, first, later or first), later


def _simple_steps(normalizer: Any) -> Optional[list[tuple[Optional[str], str]]]:
    """Returns a normalizer's steps as (old, new), in order; old None prepends.

    Returns None for other steps, or a form that the library rejects.
    """
    if normalizer is None:
        return []
    found: list[tuple[Optional[str], str]] = []
    try:
        is_sequence = normalizer["type"] == "Sequence"
        for step in normalizer["normalizers"] if is_sequence else [normalizer]:
            kind = step["type"]
            old = step["pattern"]["String"] if kind == "Replace" else ""
            new = step["content" if kind == "Replace" else "prepend"]
            if kind not in ("Replace", "Prepend") or not isinstance(old + new, str):
                return None
            found.append((old if kind == "Replace" else None, new))
    except (KeyError, TypeError):
        return None
    return found


def _byte_level_pieces(ids: Mapping[str, int]) -> dict[int, bytes]:
    """Returns the bytes of each id, decoded from GPT-2's `bytes_to_unicode`."""
    visible = [one for one in ByteLevel.alphabet() if ord(one) < 256]
    byte_of = {one: bytes([ord(one)]) for one in visible}
    hidden = [byte for byte in range(256) if chr(byte) not in visible]
    byte_of.update({chr(256 + place): bytes([byte]) for place, byte in enumerate(hidden)})
    return {
        one: b"".join(byte_of.get(character) or character.encode("utf-8") for character in piece)
        for piece, one in ids.items()
    }


def byte_level(pattern: str, *, gpt2: bool = False) -> dict[str, Any]:
    """Returns `pre_tokenizer` and `decoder` of a byte-level `tokenizer.json`, which splits texts by
    `pattern`, and with `gpt2` the rest by GPT-2's pattern."""
    matches = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps = [{**matches, "invert": False}, {**level, "use_regex": gpt2}]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": level}


def _older_content(folder: Path) -> dict[str, Any]:
    """Builds the content of `tokenizer.json` from Qwen2's older files."""
    written = read_tokenizer_config(folder).get("tokenizer_class")
    if written not in (None, *OLDER_CLASSES):
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has tokenizer_class {written!r}; without "
            f"{VOCABULARY_FILE} this version reads {' and '.join(OLDER_FILES)} of "
            f"{' or '.join(OLDER_CLASSES)}"
        )
    lines = read_text(folder / OLDER_FILES[1]).split("\n")
    added = added_tokens_decoder(folder)
    if not added:
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has no added_tokens_decoder; without "
            f"{VOCABULARY_FILE} it must name the special tokens and their ids"
        )
    return {
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        **byte_level(PATTERN),
        "model": {
            "type": "BPE",
            "vocab": read_json_object(folder / OLDER_FILES[0]),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
