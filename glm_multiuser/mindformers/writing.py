"""Patches the files of a MindFormers and reverts the patches, all or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers.tree import Tree


def patch_tree(tree: Tree) -> list[str]:
    """Applies all missing patches, and returns the files that were written.

    Raises:
        PatchError: a file cannot be written, or a patch is broken; all files are unchanged.
    """
    return _write(tree, {file.path: file.patched() for file in tree.files})


def revert_tree(tree: Tree) -> list[str]:
    """Reverts all patches, and returns the files that were written; see `patch_tree`."""
    return _write(tree, {file.path: file.pristine() for file in tree.files})


def _write(tree: Tree, contents: Mapping[str, bytes]) -> list[str]:
    changed = [file.path for file in tree.files if contents[file.path] != file.content]
    # symbolic links are kept, and their targets replaced
    write_files({(tree.root / path).resolve(): contents[path] for path in changed})
    return changed


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Replaces the contents of all files, or of none.

    Raises:
        PatchError: a file cannot be written; all are unchanged.
    """
    new: dict[Path, Path] = {}
    old: dict[Path, Path] = {}
    begun: list[Path] = []
    try:
        # Both contents are written before the first file is replaced: a full disk or a read-only
        # folder fails here, and restoring a file is a rename that needs no space.
        for path, content in contents.items():
            old[path] = write_beside(path, path.read_bytes())
            new[path] = write_beside(path, content)
        for path, temporary in new.items():
            begun.append(path)
            os.replace(temporary, path)
    except BaseException as error:  # Ctrl-C must not leave half of them replaced, either
        for path in begun:
            os.replace(old[path], path)
        if isinstance(error, OSError):
            raise PatchError(f"cannot write {path}: {error.strerror}") from error
        raise
    finally:
        for temporary in (*old.values(), *new.values()):
            temporary.unlink(missing_ok=True)


def write_beside(path: Path, content: bytes) -> Path:
    """Writes a temporary file in the same folder and with the same mode as `path`."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        shutil.copymode(path, name)
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
