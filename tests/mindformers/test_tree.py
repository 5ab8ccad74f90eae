"""Which MindFormers is it, and what was done to it?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm_multiuser.errors import PatchError
from glm_multiuser.mindformers.series import Series, blob
from glm_multiuser.mindformers.tree import open_tree
from tests.mindformers.fake import CONFIG, LAYERS, MODEL, PATCHES, Release


@pytest.mark.parametrize(
    ("patches", "state", "done"),
    [
        (0, "pristine", [0, 0, 0]),
        (1, "partly patched", [1, 0, 0]),
        (2, "partly patched", [1, 1, 1]),
        (3, "patched", [1, 2, 1]),
    ],
)
def test_the_state_of_a_tree(
    release: Release, known: list[Series], tmp_path: Path, patches: int, state: str, done: list[int]
) -> None:
    tree = open_tree(release.copied_to(tmp_path / "wheel", patches), known)
    assert tree.state == state
    assert [file.path for file in tree.files] == [CONFIG, MODEL, LAYERS]
    assert [file.done for file in tree.files] == done


@pytest.mark.parametrize("patches", [0, len(PATCHES)])
@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
def test_the_contents_tell_the_version(
    releases: dict[str, Release], known: list[Series], tmp_path: Path, version: str, patches: int
) -> None:
    folder = releases[version].copied_to(tmp_path / "wheel", patches)
    other = "mindformers-1.5.0.dist-info"
    (folder / f"mindformers-{version}.dist-info").rename(folder / other)
    assert open_tree(folder, known).series.version == version


@pytest.mark.parametrize("name", ["checkout", "mindformers", "site-packages"])
def test_a_path_may_name_the_package_or_what_it_is_in(
    release: Release, known: list[Series], tmp_path: Path, name: str
) -> None:
    folder = release.copied_to(tmp_path / name)
    (folder / "another_package").mkdir()
    assert open_tree(folder, known).root == folder
    assert open_tree(folder / "mindformers", known).root == folder


def test_a_relative_path(wheel: Path, known: list[Series], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wheel / "mindformers")
    assert open_tree(Path(), known).root == wheel


@pytest.mark.parametrize("place", ["..", "no/such/folder", "mindformers/models"])
def test_a_path_without_mindformers(wheel: Path, known: list[Series], place: str) -> None:
    with pytest.raises(PatchError, match="no MindFormers at "):
        open_tree(wheel / place, known)


def test_a_changed_file_is_named_with_what_was_expected(
    wheel: Path, release: Release, known: list[Series]
) -> None:
    pristine = (wheel / LAYERS).read_bytes()
    patched = known[1].changes_of()[LAYERS][-1].after
    (wheel / LAYERS).write_bytes(pristine + b"# mine\n")
    with pytest.raises(PatchError) as caught:
        open_tree(wheel, known)
    assert str(caught.value) == (
        f"the MindFormers at {wheel} was changed: it seems to be 2.0.0, but {LAYERS} is "
        f"{blob(pristine + b'# mine' + bytes([10]))[:12]}, expected {blob(pristine)[:12]} "
        f"(pristine) or {patched[:12]} (patched)"
    )


def test_other_line_ends_are_a_change(wheel: Path, known: list[Series]) -> None:
    (wheel / MODEL).write_bytes((wheel / MODEL).read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(PatchError, match=f"seems to be 2.0.0, but {MODEL} is "):
        open_tree(wheel, known)


def test_a_missing_file_is_named(wheel: Path, known: list[Series]) -> None:
    (wheel / CONFIG).unlink()
    with pytest.raises(PatchError, match=f"seems to be 2.0.0, but {CONFIG} is missing"):
        open_tree(wheel, known)


def test_a_file_that_cannot_be_read_is_named(wheel: Path, known: list[Series]) -> None:
    (wheel / CONFIG).unlink()
    (wheel / CONFIG).mkdir()
    with pytest.raises(PatchError, match=f"cannot read .*{CONFIG}: "):
        open_tree(wheel, known)


def without_dist_info(wheel: Path) -> None:
    shutil.rmtree(wheel / "mindformers-2.0.0.dist-info")


def test_a_changed_checkout_may_be_of_several_versions(wheel: Path, known: list[Series]) -> None:
    without_dist_info(wheel)
    (wheel / MODEL).write_text("")
    with pytest.raises(PatchError, match=f"be 1.0.0, but {MODEL} is .*, or 2.0.0, but {MODEL} is"):
        open_tree(wheel, known)


def test_a_changed_checkout_is_of_the_version_that_most_files_are_of(
    wheel: Path, known: list[Series]
) -> None:
    without_dist_info(wheel)
    (wheel / LAYERS).write_text("")
    with pytest.raises(PatchError, match=f"seems to be 2.0.0, but {LAYERS} is "):
        open_tree(wheel, known)


@pytest.mark.parametrize("stated", ["dist-info", "package"])
def test_an_unknown_version_is_named_with_the_known_ones(
    wheel: Path, known: list[Series], stated: str
) -> None:
    without_dist_info(wheel)
    (wheel / MODEL).write_text("")
    if stated == "dist-info":
        (wheel / "mindformers-1.5.0.dist-info").mkdir()
    else:
        (wheel / "mindformers" / "__init__.py").write_text('__version__ = "1.5.0"\n')
    expected = r"has version 1\.5\.0; there are patches for 1\.0\.0, 2\.0\.0$"
    with pytest.raises(PatchError, match=expected):
        open_tree(wheel, known)


def test_a_package_without_any_of_the_files(tmp_path: Path, known: list[Series]) -> None:
    (tmp_path / "mindformers").mkdir()
    with pytest.raises(PatchError, match="has no version that is known here; there are patches"):
        open_tree(tmp_path, known)
