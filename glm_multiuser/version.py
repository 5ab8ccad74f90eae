"""The version of this package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NAME = "glm_multiuser"


def own_version() -> str:
    """Returns the installed version; a checkout that is only on the path has none."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "not installed"
