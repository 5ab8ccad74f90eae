"""Reads the small JSON files next to a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from glm_multiuser.checkpoint.files import read_optional
from glm_multiuser.errors import CheckpointError

SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
ENDS = (*TURN_ENDS, "<|user|>", "<|observation|>")
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


class SpecialTokens(NamedTuple):
    """Names of special tokens outside the vocabulary file."""

    by_role: dict[str, str]
    """Those that templates know, such as `eos_token`; roles without a token are absent."""
    others: list[str]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Reads the names of special tokens.

    As in transformers, `SPECIAL_TOKENS_FILE` takes precedence over `tokenizer_config.json`, but is
    not read if that has `added_tokens_decoder`.

    Raises:
        CheckpointError: a file that is unreadable or not a JSON object.
    """
    named = read_tokenizer_config(folder)
    if "added_tokens_decoder" not in named:
        named = {**named, **read_optional(folder / SPECIAL_TOKENS_FILE)}
    roles = {name: value for name, value in named.items() if name.endswith("_token")}
    others: list[Any] = []
    for more in (named.get("additional_special_tokens"), named.get("extra_special_tokens")):
        roles.update(more if isinstance(more, dict) else {})
        others += more if isinstance(more, list) else []
    found = {role: _name(value) for role, value in roles.items()}
    return SpecialTokens(
        {role: name for role, name in found.items() if name is not None},
        [name for name in map(_name, others) if name is not None],
    )


def _name(token: Any) -> Optional[str]:
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def added_tokens_decoder(folder: Path) -> list[dict[str, Any]]:
    """Returns `added_tokens_decoder` of `tokenizer_config.json` in the format of `tokenizer.json`.

    As in transformers, a configuration without it has its tokens in `ADDED_TOKENS_FILE`.

    Raises:
        CheckpointError: an entry of another shape.
    """
    config = read_tokenizer_config(folder)
    if "added_tokens_decoder" not in config:
        return _older_added_tokens(folder)
    added = config["added_tokens_decoder"] or {}
    try:
        return [{**one, "content": str(one["content"]), "id": int(at)} for at, one in added.items()]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"tokenizer_config.json in {folder} has added_tokens_decoder {added!r}; it must be an "
            "object of ids, each with an object that has content"
        ) from None


def _older_added_tokens(folder: Path) -> list[dict[str, Any]]:
    """Returns the tokens of `ADDED_TOKENS_FILE`; those of `read_special_tokens` are special."""
    names = read_special_tokens(folder)
    special = {*names.by_role.values(), *names.others}
    added: list[dict[str, Any]] = []
    for name, token_id in read_optional(folder / ADDED_TOKENS_FILE).items():
        if type(token_id) is not int:
            raise CheckpointError(
                f"{ADDED_TOKENS_FILE} in {folder} has {name!r} with id {token_id!r}; it must be a "
                "whole number"
            )
        added.append({"content": name, "id": token_id})
        if name in special:
            added[-1]["special"] = True
    return added


def end_token_ids(folder: Path, special: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the stop token ids.

    They come from `eos_token` of `read_special_tokens`, `eos_token_id` of
    `generation_config.json`, and those of `ENDS` that are special tokens of the vocabulary.

    Raises:
        CheckpointError: a file that is not a JSON object, or no stop token id.
    """
    name = read_special_tokens(folder).by_role.get("eos_token", "")
    ids: Any = read_optional(folder / "generation_config.json").get("eos_token_id")
    known: list[Optional[int]] = [special.get(name)]
    known += ids if isinstance(ids, list) else [ids]
    known += [special.get(one) for one in ENDS]
    found = tuple(dict.fromkeys(one for one in known if isinstance(one, int)))
    if not found:
        refused = f" ({name!r} is none)" if name else ""
        raise CheckpointError(
            f"{folder} has no id that ends an answer; tokenizer_config.json must have an eos_token "
            f"that is a special token of the vocabulary{refused}, or generation_config.json an "
            "eos_token_id"
        )
    return found
