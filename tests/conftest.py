"""Servers that several files of tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.process import ServerProcess

USERS = 4
SEQ_LENGTH = 256
ARGUMENTS = ("--users", str(USERS), "--seq-length", str(SEQ_LENGTH))


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One for all tests that leave it as it was."""
    with ServerProcess(*ARGUMENTS) as process:
        yield process
