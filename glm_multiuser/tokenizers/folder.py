"""Reading the small JSON file that says which tokenizer a checkpoint folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.errors import CheckpointError


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the parsed `tokenizer_config.json`, empty when the folder has none.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    return read_optional(folder, "tokenizer_config.json")


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    """Returns a parsed JSON file of the folder, empty when the folder has none of this name.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    path = folder / name
    return read_json_object(path) if path.exists() else {}


def refuse_settings(folder: Path, config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a setting of `tokenizer_config.json` with another value.

    Args:
        folder: where it lies, for the message.
        config: the parsed file; a setting that it lacks is fine.
        only: the one value that this version can follow, of every setting that changes ids.
    """
    for name, value in only.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"tokenizer_config.json in {folder} has {name} {config[name]!r}; "
                f"this version only reads {value!r}"
            )
