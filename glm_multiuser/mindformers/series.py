"""The patches for every MindFormers version, and their application to a file's content."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from email import policy
from email.parser import HeaderParser
from io import StringIO
from pathlib import Path
from typing import Optional

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk, PatchedFile, PatchSet

from glm_multiuser import package_data
from glm_multiuser.errors import PatchError

SAME_GLM = {
    "1.0.2": {
        "1.0.0": "61efc774cbba55ea996b15380f131bf869557556",
        "1.0.1": "0015b688d1fd1b5699906d83bf53ed1dabdab23e",
        "1.0.2": "1329a56f28ff8a9bfd080fb406b090f724612224",
    }
}
"""Versions that share a series, with their git hashes of `TELLTALE`."""

TELLTALE = "mindformers/version_control.py"
"""A file that differs in every version, and that no patch changes."""


@dataclass(frozen=True)
class Change:
    """The change of one file by one patch; `before` and `after` are git hashes of its content."""

    title: str
    path: str
    before: str
    after: str
    hunks: Sequence[Hunk]


@dataclass(frozen=True)
class Patch:
    """One patch of a series; its `title` is its number and its subject."""

    title: str
    changes: Sequence[Change]


@dataclass(frozen=True)
class Series:
    """The patches for one version, in order of application.

    `earlier` are the previously published series for this version, oldest first.
    """

    version: str
    patches: Sequence[Patch]
    earlier: Sequence[Series] = ()

    @property
    def versions(self) -> Sequence[str]:
        """All versions with the same GLM."""
        return [*SAME_GLM.get(self.version, (self.version,))]

    def changes_of(self) -> Mapping[str, Sequence[Change]]:
        """Returns the changes of every touched file, in order."""
        found: dict[str, list[Change]] = {}
        for patch in self.patches:
            for change in patch.changes:
                found.setdefault(change.path, []).append(change)
        return found


def blob(content: bytes) -> str:
    """Returns git's hash of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def patches_folder() -> Path:
    """Returns the folder of the series."""
    return package_data.ROOT / package_data.PATCHES


def read_all_series(folder: Optional[Path] = None) -> list[Series]:
    """Reads the newest series of every version, by default those of this library.

    The first series are in `folder` itself, later ones in `v2` and so on.

    Raises:
        PatchError: no series, or a broken one.
    """
    folder = folder or patches_folder()
    newest: dict[str, Series] = {}
    for generation in (folder, *sorted(folder.glob("v[0-9]"))):
        for one in sorted(generation.glob("mindformers-*")):
            series = read_series(one)
            before = newest.get(series.version)
            earlier = [*before.earlier, before] if before else []
            newest[series.version] = replace(series, earlier=earlier)
    if not newest:
        raise PatchError(f"there are no patches in {folder}; install glm_multiuser again")
    return list(newest.values())


def read_series(folder: Path) -> Series:
    """Reads the patches in a folder `mindformers-<version>`.

    Raises:
        PatchError: no patches, an invalid one, or one that does not continue where the previous
            ones ended.
    """
    files = sorted(folder.glob("*.patch"))
    if not files:
        raise PatchError(f"there are no patches in {folder}")
    patches = [read_patch(file, number) for number, file in enumerate(files, 1)]
    series = Series(folder.name.partition("-")[2], patches)
    for path, changes in series.changes_of().items():
        for earlier, later in zip(changes, changes[1:]):
            if earlier.after != later.before:
                raise PatchError(f"the patches in {folder} do not follow each other in {path}")
    return series


def read_patch(file: Path, number: int) -> Patch:
    """Reads a file written by `git format-patch --full-index`.

    Ignores tests that it adds to a checkout, outside of the package.

    Raises:
        PatchError: another kind of file.
    """
    try:
        text = file.read_bytes().decode("utf-8")
        subject = HeaderParser(policy=policy.default).parsestr(text)["Subject"] or file.stem
        title = f"{number} " + re.sub(r"^\[PATCH.*?\] ", "", subject)
        files = [one for one in PatchSet(StringIO(text)) if one.path.startswith("mindformers/")]
        return Patch(title, [read_change(title, one) for one in files])
    except (OSError, ValueError, UnidiffParseError) as error:
        raise PatchError(f"{file} cannot be used as a patch: {error}") from error


def read_change(title: str, file: PatchedFile) -> Change:
    """Reads the part of a patch that changes one file.

    Raises:
        ValueError: the hashes of both contents are missing, or the file is added or removed.
    """
    blobs = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40}) ", str(file.patch_info), re.M)
    if not blobs or not file.is_modified_file:
        raise ValueError(f"{file.path} needs a full index, and must neither be new nor removed")
    return Change(title, file.path, blobs[1], blobs[2], list(file))


def applied(content: bytes, change: Change, backwards: bool = False) -> bytes:
    """Applies a change to a content; reverts it if `backwards`.

    The content must have the change's hash. As the result's hash is checked too, hunk contexts
    need not be matched.

    Raises:
        PatchError: the result does not have the change's hash.
    """
    lines = StringIO(content.decode("utf-8")).readlines()
    result: list[str] = []
    position = 0
    for hunk in change.hunks:
        old = [line.value for line in hunk.source_lines()]
        new = [line.value for line in hunk.target_lines()]
        start = hunk.source_start
        if backwards:
            old, new, start = new, old, hunk.target_start
        begin = start - 1 if old else start  # git names the line before an empty side
        result += lines[position:begin] + new
        position = begin + len(old)
    made = "".join(result + lines[position:]).encode("utf-8")
    expected = change.before if backwards else change.after
    if blob(made) != expected:
        raise PatchError(f"a patch of {change.path} gives {blob(made)} instead of {expected}")
    return made
