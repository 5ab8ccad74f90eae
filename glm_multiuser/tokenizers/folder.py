"""Reading the small JSON file that says which tokenizer a checkpoint folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm_multiuser.errors import CheckpointError


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the parsed `tokenizer_config.json`, empty when the folder has none.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object")
    return values
