"""Fixtures for tests in which the engine has its own thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glm_multiuser.device_thread import DeviceThread
from tests.engine.mock_runner import Gate


@pytest.fixture
def device_thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.stop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()
