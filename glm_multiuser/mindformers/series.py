"""The patches of every MindFormers version, and what each of them makes of a file's content."""

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
"""The versions that a series is for where they are several, and their git hashes of `TELLTALE`."""

TELLTALE = "mindformers/version_control.py"
"""A file that no patch changes and every version has otherwise."""


@dataclass(frozen=True)
class Change:
    """What one patch does to one file; `before` and `after` are git's hashes of the contents."""

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
    """The patches of one version, in the order in which they apply.

    `earlier` are the series for this version that were published before, oldest first.
    """

    version: str
    patches: Sequence[Patch]
    earlier: Sequence[Series] = ()

    @property
    def versions(self) -> Sequence[str]:
        """All versions with this GLM."""
        return [*SAME_GLM.get(self.version, (self.version,))]

    def changes_of(self) -> Mapping[str, Sequence[Change]]:
        """Every file that is touched, and its changes in their order."""
        found: dict[str, list[Change]] = {}
        for patch in self.patches:
            for change in patch.changes:
                found.setdefault(change.path, []).append(change)
        return found


def blob(content: bytes) -> str:
    """The hash that git knows a file's content by."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def patches_folder() -> Path:
    """Where the series are."""
    return package_data.ROOT / package_data.PATCHES


def read_all_series(folder: Optional[Path] = None) -> list[Series]:
    """The newest series of every version, by default of those that belong to this library.

    The first series are in `folder` itself, those that came after them in `v2` and so on.

    Raises:
        PatchError: there are none, or one of them is broken.
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
    """The patches in a folder `mindformers-<version>`.

    Raises:
        PatchError: there are no patches, a file is none, or one does not go on where those before
            it ended.
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
    """One file that `git format-patch --full-index` wrote.

    Tests that it adds to a checkout, outside of the package, are left to git.

    Raises:
        PatchError: it is something else.
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
    """The part of a patch that changes one file.

    Raises:
        ValueError: the hashes of both contents are missing, or the file is added or removed.
    """
    blobs = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40}) ", str(file.patch_info), re.M)
    if not blobs or not file.is_modified_file:
        raise ValueError(f"{file.path} needs a full index, and must neither be new nor removed")
    return Change(title, file.path, blobs[1], blobs[2], list(file))


def applied(content: bytes, change: Change, backwards: bool = False) -> bytes:
    """The content after a change; `backwards`, the content before it.

    The content has to be the one that the change names. Together with the check of the result
    that makes fitting each hunk's context needless.

    Raises:
        PatchError: the result is not the content that the change promises.
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
