"""Added tokens: special tokens, and words that are ordinary text."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

from glm_multiuser.errors import CheckpointError
from glm_multiuser.tokenizers.folder import ADDED_TOKENS_FILE

WORD_MARKS = "-'+._/"
"""As in "don't" and "C++"."""

Declared = Sequence[Union[Mapping[str, Any], str]]
"""Special tokens: entries in the form of `added_tokens`, or mere names."""


class AddedTokens(NamedTuple):
    """The `added_tokens` of a `tokenizer.json`."""

    special: dict[str, int]
    """Ids by name."""
    shown: dict[int, bytes]
    """Bytes of the tokens that answers show."""
    strips: dict[str, tuple[bool, bool]]
    """(`lstrip`, `rstrip`) of the tokens that absorb whitespace."""


def read_added_tokens(added: Sequence[Mapping[str, Any]], file: Path) -> AddedTokens:
    """Reads `added_tokens` of a `tokenizer.json`.

    All are special here: text never encodes to one. Those not marked special in the file
    (`<tool_call>` of Qwen2.5) are shown in answers.

    Raises:
        CheckpointError: a malformed entry.
    """
    try:
        named = {str(one["content"]): one for one in added if one["content"]}
        special = {name: int(one["id"]) for name, one in named.items()}
        written = {name: name.encode("utf-8") for name in named}
        shown = {special[name]: written[name] for name in named if not named[name].get("special")}
        strips = {
            name: (one.get("lstrip") is True, one.get("rstrip") is True)
            for name, one in named.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} has an added token of another shape: {error!r}") from None
    return AddedTokens(special, shown, {name: one for name, one in strips.items() if any(one)})


def is_word(name: str) -> bool:
    """Whether an added token is ordinary text: one character, or letters, numbers and spaces.

    After a letter also `WORD_MARKS`. Names that have a meaning to a model are in brackets or the
    like.
    """
    marks = WORD_MARKS if name[:1].isalpha() else ""
    return len(name) == 1 or (
        name != "" and all(one in marks or unicodedata.category(one)[0] in "LMNZ" for one in name)
    )


def with_declared(
    added: Sequence[Mapping[str, Any]],
    declared: Declared,
    ids: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    file: Path,
) -> list[Mapping[str, Any]]:
    """Returns `added` with the tokens that other files declare, as transformers reads them.

    Settings are those that are declared, ids those of the vocabulary. Mere names that it does not
    have, or that are ordinary text in it (a `pad_token` "!"), are left out.

    Raises:
        CheckpointError: a declared id is that of ordinary text.
    """
    found = {one.get("content"): one for one in added}
    text_ids = set(ids.values()) - {one.get("id") for one in added}
    made = {"".join(pair) for pair in merges}
    for one in declared:
        name = one if isinstance(one, str) else one["content"]
        known = found[name].get("id") if name in found else ids.get(name)
        if not isinstance(one, str):
            if known is None and one["id"] in text_ids:
                raise CheckpointError(
                    f"added_tokens_decoder or {ADDED_TOKENS_FILE} has {name!r} with id "
                    f"{one['id']}, which is ordinary text in {file}"
                )
            token_id = one["id"] if known is None else known
            found[name] = {**found.get(name, {}), **one, "id": token_id}
        elif name not in found and known is not None and len(name) > 1 and name not in made:
            found[name] = {"content": name, "id": known, "special": True}
    return list(found.values())


def text_among(
    added: Sequence[Mapping[str, Any]], ids: Mapping[str, int], merges: Sequence[Sequence[str]]
) -> set[str]:
    """Returns the names of added tokens that are ordinary pieces, such as a `pad_token` "!".

    Those are characters, or made by a merge, and part of other pieces.
    """
    found = {str(one.get("content")): one.get("id") for one in added}
    same = {name for name, token_id in found.items() if ids.get(name, -1) == token_id}
    made = {"".join(pair) for pair in merges}
    parts = {part for pair in merges if "".join(pair) not in same for part in pair}
    return {name for name in same & parts if len(name) == 1 or name in made}


def words_of(
    added: Sequence[Mapping[str, Any]], names: Collection[str], text: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Returns the added tokens that are ordinary text, such as "ü" of DeepSeek, by name.

    Args:
        names: that have a meaning, for example as `eos_token`.
        text: that are ordinary text although they look like names.
    """
    return {
        one["content"]: one
        for one in added
        if one.get("content") and one["content"] not in names
        if is_word(one["content"]) or one["content"] in text
        if not (one.get("special") or one.get("lstrip") or one.get("rstrip"))
    }


def without_merges_of(
    reserved: Collection[str], merges: list[list[str]], file: Path
) -> list[list[str]]:
    """Drops merges that produce a special token, so that text never encodes to one.

    Raises:
        CheckpointError: other pieces are merged from such a token, or it is a single character.
    """
    kept = [pair for pair in merges if "".join(pair) not in reserved]
    made = {"".join(pair) for pair in merges}
    parts = {part for pair in kept for part in pair}
    for piece in reserved:
        if len(piece) == 1 or (piece in made and piece in parts):
            raise CheckpointError(
                f"{file} has {piece!r} as ordinary text, so a user could write this special token"
            )
    return kept
