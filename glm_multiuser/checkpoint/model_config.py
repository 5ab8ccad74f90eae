"""What model a checkpoint folder holds, by its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_multiuser.checkpoint.json_file import read_json_object
from glm_multiuser.checkpoint.layouts import layout_of_config
from glm_multiuser.config import AnyModelConfig
from glm_multiuser.errors import CheckpointError, ConfigError


def read_model_config(folder: Path) -> AnyModelConfig:
    """The model that a folder holds, of whatever family can be read.

    Raises:
        CheckpointError: no `config.json`, one that is not a JSON object, an unknown architecture,
            a size that is missing or cannot work, or something that is not computed here.
    """
    path = Path(folder) / "config.json"
    try:
        values = read_json_object(path)
    except CheckpointError as error:
        if path.exists() or not _is_of_mindformers(path.parent):
            raise
        raise CheckpointError(
            f"{error}; a yaml of MindFormers cannot stand in for Hugging Face's config.json"
        ) from error
    return model_config_of(values, path)


def model_config_of(values: Mapping[str, Any], path: Path) -> AnyModelConfig:
    """The same for the parsed `config.json` that is at `path`."""
    try:
        config: AnyModelConfig = layout_of_config(values).read_config(values)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config


def _is_of_mindformers(folder: Path) -> bool:
    return any(folder.glob("*.ckpt")) or any(folder.glob("*.yaml"))
