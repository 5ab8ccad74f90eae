"""Reading and writing the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.replacing import replacing
from glm_multiuser.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a file that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object, complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(dict(values), indent=2, ensure_ascii=False) + "\n", "utf-8")
