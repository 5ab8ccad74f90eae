"""Levels and thread counts for operator tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.kernels.calling import PATH, levels_here, native

THREADS = 2


@pytest.fixture(scope="session")
def kernels() -> ctypes.CDLL:
    if not PATH.exists():
        pytest.skip(f"{PATH.name} was not built: no C++ compiler when the package was installed")
    return native()


@pytest.fixture(scope="module", params=levels_here() if PATH.exists() else ["no library"])
def level(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> Iterator[str]:
    """Each available level; test_library.py reports the missing ones."""
    assert kernels.glm_force_level(request.param.encode())
    kernels.glm_set_threads(THREADS)
    yield request.param
    kernels.glm_force_level(b"")


@pytest.fixture
def best_level(kernels: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """For tests that change the level or the thread count."""
    kernels.glm_set_threads(THREADS)
    yield kernels
    kernels.glm_force_level(b"")
    kernels.glm_set_threads(THREADS)
