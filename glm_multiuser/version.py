"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAME = "glm_multiuser"


def own_version() -> str:
    """As it was installed; a checkout that is only on the path has none."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "not installed"
