"""Reading patches as git writes them, and refusing what is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers.series import (
    Series,
    applied,
    blob,
    patches_folder,
    read_all_series,
    read_patch,
)
from tests.mindformers.fake import CONFIG, LAYERS, MODEL, PATCHES, Release


def copy_of(release: Release, tmp_path: Path) -> Path:
    """A folder of patches that may be damaged."""
    return Path(shutil.copytree(release.patches, tmp_path / release.patches.name))


def test_a_blob_is_what_git_calls_it() -> None:
    assert blob(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_versions_titles_and_files(known: list[Series]) -> None:
    assert [series.version for series in known] == ["1.0.0", "2.0.0"]
    assert [patch.title for patch in known[1].patches] == [
        f"{number} {subject}" for number, (subject, _) in enumerate(PATCHES, 1)
    ]
    assert [{change.path for change in patch.changes} for patch in known[1].patches] == [
        {CONFIG},
        {LAYERS, MODEL},
        {MODEL},
    ]


def test_the_series_of_this_library_can_be_read() -> None:
    known = read_all_series()
    assert [series.version for series in known] == sorted(
        folder.name.partition("-")[2] for folder in patches_folder().glob("mindformers-*")
    )
    assert "1.3.2" in [series.version for series in known]


def test_a_folder_without_series(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="there are no patches in"):
        read_all_series(tmp_path)


def test_a_series_without_patches(tmp_path: Path) -> None:
    (tmp_path / "mindformers-1.0.0").mkdir()
    with pytest.raises(PatchError, match=r"there are no patches in .*mindformers-1\.0\.0"):
        read_all_series(tmp_path)


def test_patches_that_do_not_follow_each_other(release: Release, tmp_path: Path) -> None:
    folder = copy_of(release, tmp_path)
    second = sorted(folder.iterdir())[1]
    second.rename(folder / "0009-second.patch")
    with pytest.raises(PatchError, match=f"do not follow each other in {MODEL}"):
        read_all_series(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("+    default_users = 1\n", "", "Hunk is (longer|shorter)"),
        ("index ", "number ", "needs a full index"),
        ("index ", "new file mode 100644\nindex ", "must neither be new nor removed"),
    ],
)
def test_a_patch_that_cannot_be_used_is_named(
    release: Release, tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    file = sorted(copy_of(release, tmp_path).iterdir())[0]
    file.write_text(file.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    with pytest.raises(PatchError, match=f"{file.name} cannot be used as a patch: .*{complaint}"):
        read_patch(file, 1)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "0001-x.patch"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PatchError, match=f"{file.name} cannot be used as a patch"):
        read_patch(file, 1)


def test_a_result_that_is_not_the_promised_one(release: Release, tmp_path: Path) -> None:
    file = sorted(copy_of(release, tmp_path).iterdir())[0]
    file.write_bytes(
        file.read_bytes().replace(b"+    default_users = 1", b"+    default_users = 2")
    )
    change = read_patch(file, 1).changes[0]
    with pytest.raises(PatchError, match=rf"a patch of {CONFIG} gives \w+ instead of \w+"):
        applied((release.wheel / CONFIG).read_bytes(), change)
