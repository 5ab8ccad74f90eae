"""Versions of this package and others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAME = "glm_multiuser"


def own_version() -> str:
    """Returns the installed version; a checkout that is only on the path has none."""
    return installed_version(NAME)


def installed_version(distribution: str) -> str:
    """Returns the version of a distribution without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
