"""Finds reference data computed by the original code of each model family."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def golden_folder(name: str, *files: str) -> Path:
    """Finds a folder of reference data, or skips the test with the places that were searched.

    Looks into `tests/golden`, then into the folder that the environment variable
    GLM_MULTIUSER_ORACLES names, by default `shared/oracles` beside the repository.

    Args:
        name: the folder's name.
        files: required file names, for folders that are only partly kept here.
    """
    beside = TESTS.parent.parent / "shared" / "oracles"
    places = [
        TESTS / "golden" / name,
        Path(os.environ.get("GLM_MULTIUSER_ORACLES", str(beside))) / name,
    ]
    for place in places:
        if place.is_dir() and all((place / one).is_file() for one in files):
            return place
    wanted = f"{name} with {', '.join(files)}" if files else name
    pytest.skip(f"no reference data {wanted}: looked for {' and '.join(map(str, places))}")
