"""Patching and reverting: what git would have written, on all files or on none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers.series import Series
from glm_multiuser.mindformers.tree import open_tree
from glm_multiuser.mindformers.writing import patch_tree, revert_tree
from tests.mindformers.fake import CONFIG, LAYERS, MODEL, PATCHES, Release, contents

FILES = [CONFIG, MODEL, LAYERS]


@pytest.mark.parametrize("before", range(len(PATCHES) + 1))
def test_patching_gives_what_git_gives(
    release: Release, known: list[Series], tmp_path: Path, before: int
) -> None:
    folder = release.copied_to(tmp_path / "wheel", patches=before)
    patch_tree(open_tree(folder, known))
    by_git = release.copied_to(tmp_path / "by-git", patches=len(PATCHES))
    assert contents(folder) == contents(by_git)
    assert open_tree(folder, known).state == "patched"


@pytest.mark.parametrize("before", range(len(PATCHES) + 1))
def test_reverting_gives_the_pristine_files(
    release: Release, known: list[Series], tmp_path: Path, before: int
) -> None:
    folder = release.copied_to(tmp_path / "wheel", patches=before)
    revert_tree(open_tree(folder, known))
    assert contents(folder) == contents(release.wheel)


def test_twice_writes_once(wheel: Path, known: list[Series]) -> None:
    assert revert_tree(open_tree(wheel, known)) == []
    assert patch_tree(open_tree(wheel, known)) == FILES
    assert patch_tree(open_tree(wheel, known)) == []
    assert revert_tree(open_tree(wheel, known)) == FILES


def test_what_a_killed_attempt_left_is_finished(
    release: Release, known: list[Series], tmp_path: Path
) -> None:
    folder = release.copied_to(tmp_path / "wheel")
    patched = release.copied_to(tmp_path / "patched", patches=len(PATCHES))
    (folder / MODEL).write_bytes((patched / MODEL).read_bytes())
    assert patch_tree(open_tree(folder, known)) == [CONFIG, LAYERS]
    assert contents(folder) == contents(patched)


def test_modes_and_links_stay(wheel: Path, known: list[Series], tmp_path: Path) -> None:
    (wheel / CONFIG).chmod(0o640)
    elsewhere = (wheel / MODEL).rename(tmp_path / "glm.py")
    (wheel / MODEL).symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    patch_tree(open_tree(wheel, known))
    assert (wheel / CONFIG).stat().st_mode & 0o777 == 0o640
    assert (wheel / MODEL).is_symlink()
    assert elsewhere.read_bytes() != before


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_failure_between_two_files_puts_all_back(
    wheel: Path,
    known: list[Series],
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    kind: type[BaseException],
) -> None:
    before, replace, calls = contents(wheel), os.replace, []

    def failing_replace(source: Any, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing + 1:
            raise kind(errno.EPERM, "Operation not permitted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    expected = PatchError if kind is OSError else kind
    with pytest.raises(expected) as caught:
        patch_tree(open_tree(wheel, known))
    if kind is OSError:
        assert (
            str(caught.value) == f"cannot write {wheel / FILES[failing]}: Operation not permitted"
        )
    assert contents(wheel) == before


def test_a_full_disk_changes_nothing(
    wheel: Path, known: list[Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(wheel)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copymode", full)
    with pytest.raises(PatchError, match=f"cannot write .*{CONFIG}: No space left on device"):
        patch_tree(open_tree(wheel, known))
    assert contents(wheel) == before
