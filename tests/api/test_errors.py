"""The exception tree is complete, public, and drawn as it is."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

import glm_multiuser
from glm_multiuser import errors

CLASSES = dict(
    inspect.getmembers(
        errors, lambda one: inspect.isclass(one) and one.__module__ == errors.__name__
    )
)
OF_REQUESTS = [one for one in CLASSES.values() if issubclass(one, errors.RequestError)]


def drawn_tree() -> dict[str, set[str]]:
    """Name -> names of its parents, as the docstring draws them."""
    parents: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"[\s│├└─]*(\w+Error)\b", line)
        if found:
            column, name = found.start(1), found.group(1)
            above = [entry for entry in above if entry[0] < column]
            parents.setdefault(name, set()).add(above[-1][1] if above else "Exception")
            above.append((column, name))
    return parents


def test_the_drawing_shows_every_class_under_its_parents() -> None:
    assert drawn_tree() == {
        name: {parent.__name__ for parent in one.__bases__} for name, one in CLASSES.items()
    }


def test_every_class_is_public() -> None:
    assert {name: getattr(glm_multiuser, name, None) for name in CLASSES} == CLASSES


def test_every_class_says_when_it_is_raised() -> None:
    assert all(one.__doc__ for one in CLASSES.values())


def test_the_root_catches_everything() -> None:
    assert all(issubclass(one, errors.GLMMultiUserError) for one in CLASSES.values())
    assert not issubclass(errors.GLMMultiUserError, RuntimeError)


def test_one_parent_catches_both_limits_of_requests() -> None:
    for one in (errors.QueueFullError, errors.UserBusyError):
        assert issubclass(one, errors.TooManyRequestsError)
    assert issubclass(errors.UserBusyError, errors.RequestError)
    assert not issubclass(errors.QueueFullError, errors.RequestError)


@pytest.mark.parametrize("kind", OF_REQUESTS)
def test_an_error_of_a_request_carries_its_field(kind: type[errors.RequestError]) -> None:
    error = kind("top_k is -1; it must be at least 0", field="top_k")
    assert (str(error), error.field) == ("top_k is -1; it must be at least 0", "top_k")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.field) == (type(error), str(error), "top_k")
    assert kind("something else").field is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seed": np.int64(5)}, "seed is np.int64(5); it must be an integer, between 0 and "),
        ({"temperature": np.float32(0.5)}, "temperature is np.float32(0.5); it must be a number"),
        ({"ignore_eos": np.bool_(True)}, "ignore_eos is np.bool_(True); it must be True or False"),
        ({"stop_token_ids": np.array([1])}, "stop_token_ids is array([1]); it must be a list"),
    ],
)
def test_a_message_tells_numbers_of_numpy_from_python_s(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(errors.InvalidParameterError, match=re.escape(text)):
        glm_multiuser.SamplingParams(**settings)


def test_a_setting_that_is_a_number_of_numpy() -> None:
    text = "users is np.int64(3); it must be between 1 and 1024"
    with pytest.raises(errors.ConfigError, match=re.escape(text)):
        glm_multiuser.EngineConfig(users=np.int64(3))  # type: ignore[arg-type]
