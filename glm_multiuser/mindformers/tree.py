"""Finds a MindFormers on disk, and recognises its files by their hashes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Optional

from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers.series import SAME_GLM, TELLTALE, Change, Series, applied, blob

EARLIER = "patched by an earlier series"


@dataclass(frozen=True)
class TouchedFile:
    """A file that patches change; the first `done` of its `changes` are applied to its `content`.

    If `earlier` is not empty, its changes, of an earlier series, are applied instead.
    """

    path: str
    changes: Sequence[Change]
    done: int
    content: bytes
    earlier: Sequence[Change] = ()

    @property
    def state(self) -> str:
        """The state: pristine, patched, partly patched, or patched by an earlier series."""
        if self.earlier:
            return EARLIER
        if self.done == len(self.changes):
            return "patched"
        return "partly patched" if self.done else "pristine"

    def patched(self) -> bytes:
        """Returns the content with all changes; raises PatchError if a patch is broken."""
        content = self.pristine() if self.earlier else self.content
        return reduce(applied, self.changes[self.done :], content)

    def pristine(self) -> bytes:
        """Returns the content without any changes; raises PatchError if a patch is broken."""
        done = reversed(self.earlier or self.changes[: self.done])
        return reduce(partial(applied, backwards=True), done, self.content)


@dataclass(frozen=True)
class Tree:
    """A MindFormers in the folder `root`/mindformers, with all touched files recognised."""

    root: Path
    series: Series
    files: Sequence[TouchedFile]
    version: str

    @property
    def state(self) -> str:
        """The common state of all files; else partly patched, or patched by an earlier series."""
        states = {file.state for file in self.files}
        if EARLIER in states:
            return EARLIER
        return states.pop() if len(states) == 1 else "partly patched"


def open_tree(path: Path, known: Sequence[Series]) -> Tree:
    """Recognises a MindFormers by the hashes of its files.

    Every file is recognised separately: after a part of the patches was applied, or an attempt was
    killed between two files, the rest can still be applied, and all reverted. `path` is an unpacked
    wheel, a checkout, site-packages, or the folder `mindformers` itself.

    Raises:
        PatchError: no MindFormers there, an unknown version, or a file that was modified or is
            unreadable.
    """
    root = find_root(path)
    paths = {path for series in known for path in series.changes_of()}
    try:
        contents = {path: (root / path).read_bytes() for path in paths if (root / path).exists()}
    except OSError as error:
        raise PatchError(f"cannot read {error.filename}: {error.strerror}") from error
    recognised = [recognise(series, contents) for series in known]
    for series, files in zip(known, recognised):
        if len(files) == len(series.changes_of()):
            return Tree(root, series, files, version_of(root, series))
    raise PatchError(why_unknown(root, known, recognised, contents))


def find_root(path: Path) -> Path:
    """Returns the folder of the package `mindformers`; raises PatchError if there is none."""
    path = Path(os.path.abspath(path))
    if (path / "mindformers").is_dir():
        return path
    if path.name == "mindformers" and path.is_dir():
        return path.parent
    raise PatchError(
        f"no MindFormers at {path}: name an unpacked wheel, a checkout, site-packages, or the "
        "folder `mindformers` itself"
    )


def recognise(series: Series, contents: Mapping[str, bytes]) -> list[TouchedFile]:
    """Returns the files with a content that a series knows: before, between or after its changes.

    Checks the series itself and earlier ones, for each file separately, because an attempt to
    replace an earlier one may have been killed between two files.
    """
    files = []
    for path, changes in series.changes_of().items():
        if path not in contents:
            continue
        content = contents[path]
        done = count_done(changes, content)
        if done is not None:
            files.append(TouchedFile(path, changes, done, content))
            continue
        for one in series.earlier:
            before = one.changes_of().get(path, ())
            done = count_done(before, content)
            if done is not None:
                files.append(TouchedFile(path, changes, 0, content, before[:done]))
                break
    return files


def count_done(changes: Sequence[Change], content: bytes) -> Optional[int]:
    """Returns the number of changes applied to the content; None for an unknown content."""
    blobs = [change.before for change in changes[:1]] + [change.after for change in changes]
    return blobs.index(blob(content)) if blob(content) in blobs else None


def version_of(root: Path, series: Series) -> str:
    """Returns the version of a tree that a series fits; several if no file distinguishes them."""
    try:
        found = blob((root / TELLTALE).read_bytes())
    except OSError:
        found = ""
    same = SAME_GLM.get(series.version, {})
    sure = [version for version, telltale in same.items() if telltale == found]
    return " or ".join(sure or series.versions)


def why_unknown(
    root: Path,
    known: Sequence[Series],
    recognised: Sequence[Sequence[TouchedFile]],
    contents: Mapping[str, bytes],
) -> str:
    """Explains why a tree matches no state of any series."""
    version = stated_version(root)
    most = max(1, *map(len, recognised))
    likely = [
        f"{' or '.join(series.versions)}, but {what_is_wrong(series, files, contents)}"
        for series, files in zip(known, recognised)
        if (version in series.versions if version else len(files) == most)
    ]
    if likely:
        return f"the MindFormers at {root} was changed: it seems to be {', or '.join(likely)}"
    versions = ", ".join(version for series in known for version in series.versions)
    stated = f"has version {version}" if version else "has no version that is known here"
    return f"the MindFormers at {root} {stated}; there are patches for {versions}"


def what_is_wrong(
    series: Series, files: Sequence[TouchedFile], contents: Mapping[str, bytes]
) -> str:
    """Lists the files that the series does not know, and their states."""
    fine = {file.path for file in files}
    wrong = []
    for path, changes in series.changes_of().items():
        if path not in contents:
            wrong.append(f"{path} is missing")
        elif path not in fine:
            wrong.append(
                f"{path} is {blob(contents[path])[:12]}, expected {changes[0].before[:12]} "
                f"(pristine) or {changes[-1].after[:12]} (patched)"
            )
    return "; ".join(wrong)


def stated_version(root: Path) -> Optional[str]:
    """Returns the version given by the installer or the package, if it is reliable."""
    for folder in root.glob("mindformers-*.dist-info"):
        return folder.name[len("mindformers-") : -len(".dist-info")]
    try:
        text = (root / "mindformers" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return None
    # 1.1.0 and 1.2.0 both say "1.1": only three numbers are a version
    stated = re.search(r'^__version__ = "(\d+\.\d+\.\d+[^"]*)"', text, re.M)
    return stated[1] if stated else None
