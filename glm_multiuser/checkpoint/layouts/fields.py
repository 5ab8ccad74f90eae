"""Reads fields of a `config.json`; errors name the field and its value."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, Optional

from glm_multiuser.errors import ConfigError
from glm_multiuser.model_config import check_size


def required(values: Mapping[str, Any], name: str) -> Any:
    """Returns a field; raises ConfigError if it is missing."""
    if name not in values:
        raise ConfigError(f"{name} is missing")
    return values[name]


def whole(values: Mapping[str, Any], name: str, default: Optional[int] = None) -> int:
    """Reads a size, which may be missing or null if it has a default; raises ConfigError."""
    if default is not None and values.get(name) is None:
        return default
    value: int = required(values, name)
    check_size(name, value)
    return value


def positive(values: Mapping[str, Any], name: str, default: float) -> float:
    """Reads a number, `default` if missing; raises ConfigError."""
    value = values.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1e-12 < value < 1e12:
        raise ConfigError(
            f"{name} is {reprlib.repr(value)}; it must be a number between 1e-12 and 1e12"
        )
    return float(value)


def switch(values: Mapping[str, Any], name: str) -> bool:
    """Reads a boolean, false if missing or null; raises ConfigError."""
    value = values.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def eos_token_ids(values: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Reads `eos_token_id`, one id or a list, empty if missing or null; raises ConfigError."""
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < vocab_size:
            raise ConfigError(
                f"eos_token_id is {reprlib.repr(value)}; it must be ids below the vocabulary's "
                f"{vocab_size}"
            )
    return tuple(ids)


def only(values: Mapping[str, Any], computed: Mapping[str, Any]) -> None:
    """Raises ConfigError for fields that request an unsupported feature.

    `computed` has the only supported value of each field; missing or null is accepted, too.
    """
    for name, wanted in computed.items():
        value = values.get(name)
        if value is not None and value != wanted:
            raise ConfigError(f"{name} is {value!r}; only {json.dumps(wanted)} is computed here")
