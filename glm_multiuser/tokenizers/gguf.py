"""Vocabulary and chat template of a GGUF file.

`tokenizer.ggml.model` "gpt2" is a byte-level BPE with a named pre-tokenizer; "llama" is
sentencepiece's BPE, converted to a sentencepiece model. Patterns and rules follow
`llama-vocab.cpp` in llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from glm_multiuser.checkpoint.gguf.config import END_KEYS, LLAMA_IDS, TOKENS
from glm_multiuser.checkpoint.gguf.file import GGUFFile, Strings, open_gguf
from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.added_tokens import words_of
from glm_multiuser.tokenizers.base import Vocabulary
from glm_multiuser.tokenizers.chat_template import ChatTemplate
from glm_multiuser.tokenizers.folder import ENDS, TURN_ENDS
from glm_multiuser.tokenizers.library import encode_words
from glm_multiuser.tokenizers.sentencepiece_file import SentencePieceFile
from glm_multiuser.tokenizers.tiktoken_file import PATTERN as LLAMA3_PATTERN
from glm_multiuser.tokenizers.tokenizer_json import PATTERN as QWEN2_PATTERN
from glm_multiuser.tokenizers.tokenizer_json import byte_level, vocabulary_of


class PreTokenizer(NamedTuple):
    """Splits text before pieces are merged."""

    pattern: str
    """Matches are split off first."""
    gpt2: bool = False
    """Whether GPT-2's pattern splits the rest."""
    ignore_merges: bool = False
    """Whether words in the vocabulary skip the merges."""
    begins: bool = False
    """Whether prompts begin with `bos_token_id` by default."""


LLAMA3 = PreTokenizer(LLAMA3_PATTERN, ignore_merges=True, begins=True)
QWEN2 = PreTokenizer(QWEN2_PATTERN)
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "glm4": PreTokenizer(LLAMA3_PATTERN, ignore_merges=True),
    "chatglm-bpe": PreTokenizer(LLAMA3_PATTERN),
    "smollm": PreTokenizer(r"\p{N}", gpt2=True),
}
"""By `tokenizer.ggml.pre`."""

TEMPLATE = "tokenizer.chat_template"
"""Metadata key; those of named templates add ".tool_use" and so on."""

NO_MODELS = ("none", "no_vocab")
MODELS = ("gpt2", "llama", *NO_MODELS)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`, the same as sentencepiece's."""


class GGUFTokenizer(NamedTuple):
    """The tokenizer of a GGUF file."""

    vocabulary: Vocabulary
    template: Optional[ChatTemplate]
    stop_token_ids: tuple[int, ...]


class Pieces(NamedTuple):
    """The pieces of a vocabulary, in id order."""

    path: Path
    model: str
    names: list[str]
    types: list[int]
    fields: Mapping[str, Any]
    """By name without the prefix "tokenizer.ggml.", with defaults of ids."""

    def of_type(self, *types: int) -> dict[str, int]:
        kinds = zip(self.names, self.types)
        return {name: one for one, (name, kind) in enumerate(kinds) if kind in types}

    def names_of_ids(self) -> dict[str, str]:
        """Returns `bos_token`, `eos_token` and so on for templates; "" where there is none."""
        ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {name: self.id_of(f"{theirs}_token_id") for name, theirs in ids.items()}
        return {
            f"{name}_token": self.names[one] if one is not None else ""
            for name, one in found.items()
        }

    def id_of(self, key: str) -> Optional[int]:
        """Returns an id from the metadata; raises CheckpointError if it is invalid."""
        value = self.fields.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.names)):
            raise CheckpointError(
                f"tokenizer.ggml.{key} of {self.path} is {value!r}; it must be an id below "
                f"{len(self.names)}"
            )
        return value


def read_gguf_tokenizer(path: Path) -> Optional[GGUFTokenizer]:
    """Reads the tokenizer of a GGUF file; None if the file has none.

    Raises:
        CheckpointError: as `open_gguf`, or an unsupported or inconsistent vocabulary, or an
            invalid template.
    """
    file = open_gguf(path)
    pieces = read_pieces(file)
    if pieces is None:
        return None
    end_ids = [one for one in map(pieces.id_of, END_KEYS) if one is not None]
    ends = (*(pieces.names[one] for one in end_ids), *ENDS)
    if pieces.model == "gpt2":
        vocabulary = vocabulary_of(tokenizer_json(pieces), path, ends=ends)
    else:
        vocabulary = _sentencepiece_vocabulary(pieces, ends)
    begins = pieces.model == "llama" or PRE_TOKENIZERS[pieces.fields["pre"]].begins
    if pieces.fields.get("add_bos_token", begins) is True:
        vocabulary = replace(vocabulary, begin_id=pieces.id_of("bos_token_id"))
    known = vocabulary.special
    stops = tuple(dict.fromkeys((*end_ids, *(known[one] for one in ENDS if one in known))))
    return GGUFTokenizer(vocabulary, _template(file, pieces), stops)


def _sentencepiece_vocabulary(pieces: Pieces, ends: Collection[str]) -> Vocabulary:
    vocabulary = SentencePieceFile(pieces.path, sentencepiece_model(pieces)).vocabulary()
    shown = pieces.of_type(USER_DEFINED)
    words = words_of([{"content": name, "id": one} for name, one in shown.items()], ends, ())
    encode = vocabulary.encode
    return replace(
        vocabulary,
        encode=encode_words(words, encode, encode),
        pieces={**vocabulary.pieces, **{one: name.encode() for name, one in shown.items()}},
        special={name: one for name, one in vocabulary.special.items() if name not in words},
    )


def read_pieces(file: GGUFFile) -> Optional[Pieces]:
    """Reads the vocabulary; None if there is none. Raises CheckpointError."""
    prefix = "tokenizer.ggml."
    fields = {
        key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    model = fields.get("model", "none")
    if not isinstance(model, str) or model not in MODELS:
        raise CheckpointError(
            f"tokenizer.ggml.model of {file.path} is {model!r}; this version reads "
            f"{', '.join(map(repr, MODELS))}"
        )
    if model in NO_MODELS:
        return None
    # As llama.cpp calls those without a name.
    tokens = _strings(file.path, fields, "tokens")
    names = [name or f"[EMPTY_{one}]" for one, name in enumerate(tokens)]
    types = fields.get("token_type")
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu":
        raise CheckpointError(f"{file.path} has no tokenizer.ggml.token_type of whole numbers")
    _check_length(file.path, "token_type", types, names)
    if not ((types >= NORMAL) & (types <= BYTE)).all():
        raise CheckpointError(
            f"tokenizer.ggml.token_type of {file.path} has values that are not {NORMAL} to {BYTE}"
        )
    # Some converters write names that end a turn as ordinary text.
    kinds = [
        CONTROL if kind == NORMAL and name in TURN_ENDS else kind
        for name, kind in zip(names, types.tolist())
    ]
    return Pieces(file.path, model, names, kinds, _with_default_ids(fields, model, len(names)))


def _with_default_ids(fields: Mapping[str, object], model: str, size: int) -> dict[str, object]:
    """Returns the fields without ids that some converters write for "none", such as -1."""

    def is_none(key: str, value: object) -> bool:
        optional = key in ("padding_token_id", "unknown_token_id")
        return optional and isinstance(value, int) and not 0 <= value < size

    defaults = LLAMA_IDS if model == "llama" and size > max(LLAMA_IDS.values()) else {}
    given = {key: value for key, value in fields.items() if not is_none(key, value)}
    return {**defaults, **given}


def _strings(path: Path, fields: Mapping[str, Any], key: str) -> list[str]:
    found = fields.get(key)
    if not isinstance(found, Strings) or not found.number:
        raise CheckpointError(f"{path} has no tokenizer.ggml.{key} of strings")
    return found.read()


def _check_length(path: Path, key: str, values: Sized, names: Sized) -> None:
    if len(values) != len(names):
        raise CheckpointError(
            f"tokenizer.ggml.{key} of {path} has {len(values)} entries; {TOKENS} has {len(names)}"
        )


def tokenizer_json(pieces: Pieces) -> dict[str, Any]:
    """Returns the content of a `tokenizer.json` with this byte-level vocabulary."""
    name = pieces.fields.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre of {pieces.path} is {name!r}; this version reads "
            f"{', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    pre = PRE_TOKENIZERS[name]
    hidden, shown = pieces.of_type(CONTROL, UNKNOWN), pieces.of_type(USER_DEFINED)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {**plain, "content": one, "id": token_id, "special": one in hidden}
            for one, token_id in {**hidden, **shown}.items()
        ],
        **byte_level(pre.pattern, gpt2=pre.gpt2),
        "model": {
            "type": "BPE",
            "vocab": {**pieces.of_type(NORMAL, BYTE), **hidden, **shown},
            "merges": _strings(pieces.path, pieces.fields, "merges"),
            "ignore_merges": pre.ignore_merges,
        },
    }


def adds_space_prefix(pieces: Pieces) -> bool:
    """Whether a space is prepended to each text of a sentencepiece vocabulary."""
    return pieces.fields.get("add_space_prefix", True) is True


def sentencepiece_model(pieces: Pieces) -> bytes:
    """Serialises a `ModelProto` of sentencepiece_model.proto, with the fields that matter.

    User-defined pieces become control symbols: otherwise sentencepiece would match them in text,
    and users could write special tokens. sentencepiece needs exactly one unknown piece: older
    converters wrote padding as unknown pieces, too, which become unused ones.
    """
    scores = pieces.fields.get("scores")
    if not isinstance(scores, np.ndarray) or not np.isfinite(scores).all():
        raise CheckpointError(f"{pieces.path} has no tokenizer.ggml.scores of finite numbers")
    _check_length(pieces.path, "scores", scores, pieces.names)
    content = []
    unknown = pieces.id_of("unknown_token_id")
    if unknown is None:
        unknown = next(iter(pieces.of_type(UNKNOWN).values()), 0)
    for one, (name, kind, score) in enumerate(zip(pieces.names, pieces.types, scores.tolist())):
        kind = CONTROL if kind == USER_DEFINED else kind
        kind = UNUSED if kind == UNKNOWN else kind
        kind = UNKNOWN if one == unknown else kind
        number = struct.pack("<f", score)
        content.append(_field(1, _field(1, name.encode()) + b"\x15" + number + _number(3, kind)))
    bpe = _number(3, 2) + _number(35, True)  # model_type, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    prefix = _number(3, adds_space_prefix(pieces))
    identity = _field(1, b"identity") + prefix + _number(4, False) + _number(5, True)
    return b"".join(content) + _field(2, bpe) + _field(3, identity)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _template(file: GGUFFile, pieces: Pieces) -> Optional[ChatTemplate]:
    sources = []
    for key in (TEMPLATE, f"{TEMPLATE}.tool_use"):
        source = file.metadata.get(key, "")
        if not isinstance(source, str):
            raise CheckpointError(f"{key} of {file.path} is {type(source).__name__}, not a string")
        sources.append(source)
    # As of a folder: where only one of them is there, it is for all conversations.
    default, for_tools = sources[0] or sources[1], sources[1]
    if not default:
        return None
    return ChatTemplate(default, f"{TEMPLATE} of {file.path}", pieces.names_of_ids(), for_tools)
