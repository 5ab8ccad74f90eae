"""The exception tree is complete, public, and drawn as it is."""

from __future__ import annotations

import inspect
import re

import glm_multiuser
from glm_multiuser import errors

CLASSES = {name: one for name, one in vars(errors).items() if inspect.isclass(one)}


def drawn_tree() -> dict[str, str]:
    """Name -> name of its parent, as the docstring draws it."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"[\s│├└─]*(\w+Error)\b", line)
        if found:
            column, name = found.start(1), found.group(1)
            above = [entry for entry in above if entry[0] < column]
            parents[name] = above[-1][1] if above else "Exception"
            above.append((column, name))
    return parents


def test_the_drawing_shows_every_class_under_its_parent() -> None:
    assert drawn_tree() == {name: one.__base__.__name__ for name, one in CLASSES.items()}


def test_every_class_is_public() -> None:
    assert {name: getattr(glm_multiuser, name, None) for name in CLASSES} == CLASSES


def test_every_class_says_when_it_is_raised() -> None:
    assert all(one.__doc__ for one in CLASSES.values())


def test_the_root_catches_everything() -> None:
    assert all(issubclass(one, errors.GLMMultiUserError) for one in CLASSES.values())
    assert not issubclass(errors.GLMMultiUserError, RuntimeError)
