"""Reading the small JSON file that says which tokenizer a checkpoint folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.json_file import read_json_object


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Returns the parsed `tokenizer_config.json`, empty when the folder has none.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.exists() else {}
