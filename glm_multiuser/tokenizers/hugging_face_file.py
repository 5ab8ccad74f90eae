"""Byte-level BPE vocabularies for the library tokenizers: `tokenizer.json`, or its older form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from tokenizers import Tokenizer  # type: ignore[import-untyped]

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.byte_level import ByteVocabulary
from glm_multiuser.tokenizers.folder import read_optional, read_tokenizer_config

VOCABULARY_FILE = "tokenizer.json"
OLDER_FILES = ("vocab.json", "merges.txt")

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts a text before pieces are merged, from tokenization_qwen2.py of transformers."""


def read_hugging_face_files(folder: Path) -> ByteVocabulary:
    """Reads the vocabulary of a folder.

    Every added token is special: also those that the file does not call so (`<tool_call>` of
    Qwen2.5) never come from a text, but an answer shows them.

    Args:
        folder: with `tokenizer.json`, or with `vocab.json`, `merges.txt` and the added tokens
            in `tokenizer_config.json`.

    Raises:
        CheckpointError: a file that is missing or broken, a vocabulary of another kind, or one
            in which a user could write a special token as text.
    """
    file = folder / VOCABULARY_FILE
    if file.exists():
        content = read_json_object(file)
    else:
        file = folder / OLDER_FILES[0]
        content = _older_content(folder)
    try:
        model = content["model"]
        tokens = [one for one in content["added_tokens"] if one["content"]]
        added = {str(one["content"]): int(one["id"]) for one in tokens}
        shown = {int(one["id"]) for one in tokens if not one.get("special")}
        vocabulary = {str(piece): int(token_id) for piece, token_id in model["vocab"].items()}
        # Newer files write a merge as a pair, which only newer versions of the library read.
        merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a byte-level BPE vocabulary: {error!r}") from None
    if "ByteLevel" not in json.dumps(content.get("decoder")) or model.get("ignore_merges"):
        raise CheckpointError(
            f"{file} has model {model.get('type')!r}, decoder {content.get('decoder')!r} and "
            f"ignore_merges {model.get('ignore_merges')!r}; this version reads 'BPE' with "
            "a decoder 'ByteLevel' and without ignore_merges"
        )
    model = {**model, "merges": merges}
    # Without them, the names of added tokens are ordinary text.
    plain = {**content, "model": model, "added_tokens": [], "post_processor": None}
    plain.update(truncation=None, padding=None)
    tokenizer = _load(plain, file)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    for name, token_id in added.items():
        if token_id in encode(name):
            raise CheckpointError(
                f"{file} has {name!r} as ordinary text, so a user could write this special token"
            )
    byte_of = _bytes_by_character()
    special_ids = set(added.values())
    pieces = {
        token_id: b"".join(byte_of.get(one) or one.encode("utf-8") for one in piece)
        for piece, token_id in vocabulary.items()
        if token_id not in special_ids
    }
    pieces.update(
        {token_id: name.encode("utf-8") for name, token_id in added.items() if token_id in shown}
    )
    return ByteVocabulary(encode, pieces, added)


def _load(content: Mapping[str, Any], file: Path) -> Any:
    try:
        return Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{file} cannot be read by tokenizers: {error}") from None


def _older_content(folder: Path) -> dict[str, Any]:
    """What `tokenizer.json` would hold, from Qwen2's older files."""
    merges = folder / OLDER_FILES[1]
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {merges}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{merges} is not UTF-8: {error}") from None
    added = read_tokenizer_config(folder).get("added_tokens_decoder")
    if not isinstance(added, dict) or not added:
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has added_tokens_decoder {added!r}; "
            f"without {VOCABULARY_FILE} it must name the special tokens and their ids"
        )
    if not all(isinstance(one, dict) for one in added.values()):
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has an added token that is no JSON object"
        )
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "version": "1.0",
        "added_tokens": [{**one, "id": token_id} for token_id, one in added.items()],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**level, "use_regex": False}],
        },
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": read_json_object(folder / OLDER_FILES[0]),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }


def _bytes_by_character() -> dict[str, bytes]:
    """The byte that each character of a piece stands for, as in GPT-2's `bytes_to_unicode`."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): bytes([byte]) for byte in visible}
    table.update({chr(256 + place): bytes([byte]) for place, byte in enumerate(hidden)})
    return table


def end_token_ids(folder: Path, special: Mapping[str, int]) -> tuple[int, ...]:
    """Ids that end an answer: what the folder says, and the two that Qwen2 ends with.

    They come from `eos_token` of `tokenizer_config.json` and `eos_token_id` of
    `generation_config.json`, then `<|im_end|>` and `<|endoftext|>` where the vocabulary has them.

    Raises:
        CheckpointError: a file that is not a JSON object, or no such id at all.
    """
    name = read_tokenizer_config(folder).get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    ids: Any = read_optional(folder, "generation_config.json").get("eos_token_id")
    known: list[Optional[int]] = [special.get(str(name))]
    known += ids if isinstance(ids, list) else [ids]
    known += [special.get("<|im_end|>"), special.get("<|endoftext|>")]
    found = tuple(dict.fromkeys(one for one in known if isinstance(one, int)))
    if not found:
        raise CheckpointError(
            f"{folder} says no id that ends an answer; tokenizer_config.json must have an "
            "eos_token, or generation_config.json an eos_token_id"
        )
    return found
