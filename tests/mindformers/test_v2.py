"""The second series of patches, beside the published first one."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from glm_multiuser.mindformers.series import TELLTALE, Series, blob, read_all_series
from glm_multiuser.mindformers.tree import EARLIER, open_tree
from glm_multiuser.mindformers.writing import patch_tree, revert_tree
from tests.mindformers.fake import contents, git
from tests.mindformers.wheels import PATCHES, PUBLISHED, VERSIONS, apply, patches_of, unpacked

DIGESTS = {
    "0.8.0": "10a2410fd819cc5c7aad84d9f826b892eace592da70816d72d85ea257447a64e",
    "1.0.2": "ab98b2747123e5f2f4efbfa686e4e9dce08e5a26695773afaf35005873c172d6",
    "1.1.0": "e637ff956972ec900b461a6d627fb13f8cf0256ec64290ff470b8437bdfaa965",
    "1.2.0": "870549dfe2ca556ecb5241a28e6370d67d7debd6a799f660a7b0ba72045e7f5b",
    "1.3.2": "9d0a448acf80e8e6fca26e276fcf05226c872c120ba138f59a1e4321ba4aeaf8",
}
"""Of all files of the first series: name, a zero, content, a zero, in the order of their names."""


@pytest.fixture(scope="module")
def newest() -> dict[str, Series]:
    return {series.version: series for series in read_all_series()}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    number: str = request.param
    return number


@pytest.fixture
def pristine(
    version: str, newest: dict[str, Series], tmp_path: Path, request: pytest.FixtureRequest
) -> Path:
    """The files of a version that its patches change."""
    touched = [*newest[version].changes_of(), TELLTALE]
    return unpacked(tmp_path / "pristine", request.config.cache, version, touched)


def patched_by(folder: Path, pristine: Path, version: str, count: int = 99) -> Path:
    """A copy of it with the first few patches of a series, applied by git."""
    tree = pristine.with_name(folder.name)
    for path, content in contents(pristine).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    for patch in patches_of(version, folder)[:count]:
        apply(patch, tree)
    return tree


def test_what_was_published_has_not_changed(version: str) -> None:
    digest = sha256()
    for file in sorted((PUBLISHED / f"mindformers-{version}").iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    assert digest.hexdigest() == DIGESTS[version]


def test_git_am_takes_them_and_would_write_them_again(
    version: str, pristine: Path, tmp_path: Path
) -> None:
    """So they have three lines of context, and one patch goes on where the one before it ended."""
    patches = patches_of(version)
    git(pristine, "init", "-q")
    git(pristine, "add", ".")
    git(pristine, "commit", "-q", "-m", f"MindFormers {version}")
    git(pristine, "am", "-q", *map(str, patches))
    options = ("--full-index", "--zero-commit", "--no-signature", "--no-numbered", "-q")
    start = f"HEAD~{len(patches)}"
    git(pristine, "format-patch", *options, "-o", str(tmp_path / "again"), start)
    assert contents(tmp_path / "again") == {file.name: file.read_bytes() for file in patches}


@pytest.mark.parametrize("count", [0, 1, 4, 99])
def test_the_first_series_becomes_the_second(
    version: str, pristine: Path, newest: dict[str, Series], count: int
) -> None:
    tree = patched_by(PUBLISHED, pristine, version, count)
    known = [*newest.values()]
    patch_tree(open_tree(tree, known))
    assert contents(tree) == contents(patched_by(PATCHES, pristine, version))
    assert open_tree(tree, known).state == "patched"
    assert patch_tree(open_tree(tree, known)) == []


def test_the_first_series_is_recognised_and_taken_back(
    version: str, pristine: Path, newest: dict[str, Series]
) -> None:
    tree = patched_by(PUBLISHED, pristine, version)
    found = open_tree(tree, [*newest.values()])
    assert (found.state, found.version) == (EARLIER, version)
    revert_tree(found)
    assert contents(tree) == contents(pristine)


def test_an_exchange_that_was_killed_is_finished_or_taken_back(
    version: str, pristine: Path, newest: dict[str, Series]
) -> None:
    half, whole = (patched_by(folder, pristine, version) for folder in (PUBLISHED, PATCHES))
    layers = "mindformers/models/glm/layers.py"
    (half / layers).write_bytes((whole / layers).read_bytes())
    found = open_tree(half, [*newest.values()])
    assert found.state == EARLIER
    patch_tree(found)
    assert contents(half) == contents(whole)
    (half / layers).write_bytes((patched_by(PUBLISHED, pristine, version) / layers).read_bytes())
    revert_tree(open_tree(half, [*newest.values()]))
    assert contents(half) == contents(pristine)


@pytest.mark.parametrize("version", ["1.0.2"], indirect=True)
def test_versions_with_the_same_glm_are_told_apart(
    pristine: Path, newest: dict[str, Series], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [*newest.values()]
    assert newest["1.0.2"].versions == ["1.0.0", "1.0.1", "1.0.2"]
    assert open_tree(pristine, known).version == "1.0.2"
    (pristine / TELLTALE).write_bytes(b"another")
    assert open_tree(pristine, known).version == "1.0.0 or 1.0.1 or 1.0.2"
    same = {"1.0.1": blob(b"another"), "1.0.2": ""}
    monkeypatch.setattr("glm_multiuser.mindformers.tree.SAME_GLM", {"1.0.2": same})
    assert open_tree(pristine, known).version == "1.0.1"


@pytest.mark.rare
@pytest.mark.parametrize("number", ["1.0.0", "1.0.1"])
def test_the_wheels_of_such_versions(
    number: str, newest: dict[str, Series], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tree = unpacked(tmp_path / "wheel", request.config.cache, number)
    found = open_tree(tree, [*newest.values()])
    assert (found.version, found.series.version) == (number, "1.0.2")
    patch_tree(found)
    assert open_tree(tree, [*newest.values()]).version == number
