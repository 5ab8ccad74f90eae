"""Reading the fields of a `config.json`; every error names the field and its value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm_multiuser.errors import ConfigError


def required(values: Mapping[str, Any], name: str) -> Any:
    """Raises ConfigError if the field is not there."""
    if name not in values:
        raise ConfigError(f"{name} is missing")
    return values[name]


def whole(values: Mapping[str, Any], name: str) -> int:
    """A size, which may not be left out; raises ConfigError."""
    value = required(values, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def positive(values: Mapping[str, Any], name: str, default: float) -> float:
    """A number, `default` if left out; raises ConfigError."""
    value = values.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0 and below 1e12")
    return float(value)


def switch(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false, `default` if left out or null; raises ConfigError."""
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def eos_token_ids(values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id`, which is one id or a list of them; raises ConfigError."""
    value = required(values, "eos_token_id")
    ids = value if isinstance(value, list) else [value]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < vocab_size:
            raise ConfigError(
                f"eos_token_id is {value!r}; it must be ids below the vocabulary's {vocab_size}"
            )
    return tuple(ids)


def only(values: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Refuses fields that ask for something that is not computed here.

    Args:
        values: a parsed `config.json`.
        computed: field -> the only value of it that is; left out or null is all right, too.

    Raises:
        ConfigError: another value.
    """
    for name, wanted in computed.items():
        value = values.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"{name} is {value!r}; only {json.dumps(wanted)} is computed here")


def with_rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with those of `rope_parameters` among them: transformers 5 writes it that way.

    Raises:
        ConfigError: positions that are scaled.
    """
    merged = dict(values)
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind != "default":
            raise ConfigError(f"{name} is {rope!r}; only rope_type 'default' is computed here")
        merged.update(rope)
    return merged
