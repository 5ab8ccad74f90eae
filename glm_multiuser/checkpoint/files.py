"""Reads small files, and writes files and folders that are complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm_multiuser.errors import CheckpointError


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts errors while a file is opened or read to CheckpointError.

    Pipes and devices are rejected: reading them could block, or never end.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise CheckpointError(f"{path} is no regular file")
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: Path) -> str:
    """Reads a text file.

    Raises:
        CheckpointError: the file is unreadable, or not UTF-8.
    """
    try:
        with reading(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Parses a file with one JSON object.

    Raises:
        CheckpointError: the file is unreadable, not JSON, or another JSON value.
    """
    try:
        with reading(path):
            values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not a JSON object")
    return values


def read_optional(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but returns {} for a missing file."""
    return read_json_object(path) if path.exists() else {}


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object, complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(dict(values), indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a file to write to, which replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to, whose files move to `folder` when the block ends without error.

    A missing or empty folder gets all files atomically. In a folder with files, those of the same
    names are replaced one by one.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        if folder.is_dir() and any(folder.iterdir()):
            for path in filter(Path.is_file, temporary.rglob("*")):
                place = folder / path.relative_to(temporary)
                place.parent.mkdir(exist_ok=True)
                os.replace(path, place)
        else:
            os.replace(temporary, folder)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
