"""Reading the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
