"""Writing files and folders that are complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch()
    usual_mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(usual_mode)  # safetensors writes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose files appear in `folder` when the block ends without an error.

    A folder that is not there, or is empty, is there with all its files at once. If it has files
    already, those of the same names are replaced, one after the other.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        if folder.is_dir() and any(folder.iterdir()):
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
        else:
            os.replace(temporary, folder)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
