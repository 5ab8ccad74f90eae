"""Published versions of MindFormers: fetched from the index, unpacked, patched by git."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from glm_multiuser.mindformers.series import SAME_GLM

PUBLISHED = Path(__file__).resolve().parents[2] / "patches"
PATCHES = PUBLISHED / "v2"
VERSIONS = ("0.8.0", "1.0.2", "1.1.0", "1.2.0", "1.3.2")
"""Those that have a series of their own."""

SERIES_OF = {same: version for version, those in SAME_GLM.items() for same in those}
ALL_VERSIONS = sorted({*VERSIONS, *SERIES_OF})

ONLY_RUN = ("Cast-the-weights-of-the-head", "Import-under-MindSpore-2.7", "Let-generate-run")
"""How the names of those patches begin without which upstream does not even run."""

ROTARY = "Compute-the-rotary-tables"
NUMERICS = ("Compute-the-MLP", ROTARY, "Exponentiate-once")
"""The patches that change what is computed."""

CHOICES: dict[str, Callable[[str], bool]] = {
    "unpatched": lambda name: name.startswith(ONLY_RUN),
    "users only": lambda name: not name.startswith(NUMERICS),
    "half rotary tables": lambda name: not name.startswith(ROTARY),
    "whole": lambda name: True,
}


def make_tree(folder: Path, cache: pytest.Cache, version: str, choice: str) -> Path:
    """Unpacks a version below `folder` and applies the patches of a choice."""
    tree = unpacked(folder / f"{version} {choice}", cache, version)
    for patch in chosen_patches(version, choice):
        apply(patch, tree)
    return tree


def unpacked(tree: Path, cache: pytest.Cache, version: str, only: Sequence[str] = ()) -> Path:
    """Unpacks a wheel, or `only` these files of it, into a new folder."""
    with zipfile.ZipFile(fetch(version, cache)) as wheel:
        wheel.extractall(tree, only or None)
    return tree


def fetch(version: str, cache: pytest.Cache) -> Path:
    """The wheel, from the index if no earlier run of the tests has fetched it."""
    folder = cache.mkdir("wheels")
    wheel = folder / f"mindformers-{version}-py3-none-any.whl"
    if not wheel.exists():
        # Another process of the same run may want it at this moment, and must not see a part of it.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            command = ["pip", "download", "--no-deps", "-d", own, f"mindformers=={version}"]
            run([sys.executable, "-m", *command], folder)
            (Path(own) / wheel.name).replace(wheel)
    return wheel


def patches_of(version: str, folder: Path = PATCHES) -> list[Path]:
    """The files of a series, in their order."""
    return sorted((folder / f"mindformers-{SERIES_OF.get(version, version)}").glob("*.patch"))


def chosen_patches(version: str, choice: str) -> list[Path]:
    """The files of a choice, in their order."""
    every = patches_of(version)
    names = {patch: patch.name.split("-", 1)[1] for patch in every}
    # A patch with another name would silently be left out, or not.
    for begin in (ONLY_RUN[0], *NUMERICS):
        assert sum(name.startswith(begin) for name in names.values()) == 1, (version, begin)
    return [patch for patch in every if CHOICES[choice](names[patch])]


def apply(patch: Path, tree: Path) -> None:
    """Applies what a patch does to the package, and makes sure of it: in a folder that another
    repository ignores, git finds nothing to do and succeeds."""
    names = re.findall(r"^\+\+\+ b/(mindformers/.*)$", patch.read_text("utf-8"), re.M)
    files = [tree / name for name in names]
    before = [file.read_bytes() for file in files]
    run(["git", "apply", "--include=mindformers/*", str(patch)], tree)
    assert files
    for file, content in zip(files, before):
        assert file.read_bytes() != content, (patch, file)


def run(command: list[str], folder: Path) -> None:
    """Runs a command, and fails with what it said."""
    # What git tells its hooks would lead it to the repository that is being committed to.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**own, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
