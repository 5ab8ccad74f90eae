"""Reads the small JSON files next to a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from glm_multiuser.checkpoint.files import read_optional
from glm_multiuser.errors import CheckpointError

SPECIAL_TOKENS_FILE = "special_tokens_map.json"

ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|user|>", "<|observation|>"),
)
"""End-of-message tokens of Qwen, Llama 3 and GLM-4, used besides a folder's `eos_token`."""


def read_tokenizer_config(folder: Path, only: Optional[Mapping[str, Any]] = None) -> dict[str, Any]:
    """Returns the parsed `tokenizer_config.json`, empty if the folder has none.

    `only` gives the one supported value of each setting that changes ids.

    Raises:
        CheckpointError: the file is unreadable or not a JSON object, or a setting has another
            value.
    """
    config = read_optional(folder / "tokenizer_config.json")
    for name, value in (only or {}).items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"tokenizer_config.json in {folder} has {name} {config[name]!r}; "
                f"this version only reads {value!r}"
            )
    return config


def special_token_names(folder: Path) -> dict[str, str]:
    """Returns the names of special tokens that templates know, such as `eos_token`.

    As in transformers, `SPECIAL_TOKENS_FILE` takes precedence over `tokenizer_config.json`, but is
    not read if that has `added_tokens_decoder`; what neither names is absent.

    Raises:
        CheckpointError: a file that is unreadable or not a JSON object.
    """
    named = read_tokenizer_config(folder)
    if "added_tokens_decoder" not in named:
        named = {**named, **read_optional(folder / SPECIAL_TOKENS_FILE)}
    more = named.get("extra_special_tokens")
    named = {name: value for name, value in named.items() if name.endswith("_token")}
    named.update(more if isinstance(more, dict) else {})
    found = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: value for name, value in found.items() if isinstance(value, str)}


def added_tokens_decoder(folder: Path) -> list[dict[str, Any]]:
    """Returns `added_tokens_decoder` of `tokenizer_config.json` in the format of `tokenizer.json`.

    Raises:
        CheckpointError: an entry that is not a JSON object.
    """
    added = read_tokenizer_config(folder).get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(isinstance(one, dict) for one in added.values()):
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has added_tokens_decoder {added!r}; it must be an "
            "object of objects"
        )
    return [{**one, "id": token_id} for token_id, one in added.items()]


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

    All are special: text never encodes to one. Those not marked special in the file (`<tool_call>`
    of Qwen2.5) are shown in answers.

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


def end_token_ids(folder: Path, special: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the stop token ids.

    They come from `eos_token` of `special_token_names`, `eos_token_id` of
    `generation_config.json`, and those of `ENDS` that are special tokens of the vocabulary.

    Raises:
        CheckpointError: a file that is not a JSON object, or no stop token id.
    """
    name = special_token_names(folder).get("eos_token", "")
    ids: Any = read_optional(folder / "generation_config.json").get("eos_token_id")
    known: list[Optional[int]] = [special.get(name)]
    known += ids if isinstance(ids, list) else [ids]
    known += [special.get(one) for one in ENDS]
    found = tuple(dict.fromkeys(one for one in known if isinstance(one, int)))
    if not found:
        raise CheckpointError(
            f"{folder} has no id that ends an answer; tokenizer_config.json must have an "
            "eos_token, or generation_config.json an eos_token_id"
        )
    return found
