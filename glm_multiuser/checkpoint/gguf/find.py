"""Finds the GGUF file of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

from glm_multiuser.checkpoint.ckpt_file import find_ckpt
from glm_multiuser.checkpoint.files import reading
from glm_multiuser.checkpoint.gguf.file import MAGIC, PART, SUFFIX
from glm_multiuser.checkpoint.huggingface import has_weights
from glm_multiuser.errors import CheckpointError


def find_gguf(source: Path) -> Optional[Path]:
    """Returns the GGUF file at a path, or in a folder without other weights.

    None for other checkpoints. For a split model, the first file.

    Raises:
        CheckpointError: several models in a folder, or an unreadable file.
    """
    source = Path(source)
    if not os.path.isdir(source):
        if source.suffix == SUFFIX:
            return source
        if not os.path.isfile(source):
            return None
        with reading(source), source.open("rb") as file:
            return source if file.read(len(MAGIC)) == MAGIC else None
    models = {_first_part(path) for path in source.glob(f"*{SUFFIX}")}
    if not models or has_weights(source) or find_ckpt(source):
        return None
    if len(models) > 1:
        names = ", ".join(sorted(path.name for path in models))
        raise CheckpointError(f"{source} has several GGUF models, {names}; name one of them")
    return models.pop()


def _first_part(path: Path) -> Path:
    part = PART.fullmatch(path.name)
    return path.with_name(f"{part[1]}-00001-of-{part[3]}{SUFFIX}") if part else path
