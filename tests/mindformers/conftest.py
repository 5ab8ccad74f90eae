"""Two small releases with their patches, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_multiuser.mindformers.series import Series, read_all_series
from tests.mindformers.fake import Release, make_release


@pytest.fixture(scope="package")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Release]:
    """Versions 1.0.0 and 2.0.0, which differ in one file only."""
    folder = tmp_path_factory.mktemp("releases")
    return {
        version: make_release(folder, version, own)
        for version, own in (("1.0.0", "long ago"), ("2.0.0", "today"))
    }


@pytest.fixture(scope="package")
def release(releases: dict[str, Release]) -> Release:
    """The newer one."""
    return releases["2.0.0"]


@pytest.fixture(scope="package")
def known(release: Release) -> list[Series]:
    """The series of both."""
    return read_all_series(release.patches.parent)


@pytest.fixture
def wheel(release: Release, tmp_path: Path) -> Path:
    """A pristine copy of the newer one."""
    return release.copied_to(tmp_path / "wheel")
