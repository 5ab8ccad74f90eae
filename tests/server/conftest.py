"""A server with a numpy model, and the official client for its OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import OTHER, sync_client


@pytest.fixture(scope="module")
def mock() -> Iterator[InProcessServer]:
    """Shared by all tests of a file, which do not change its state."""
    with in_process_server(mock_settings(users=4, max_queue=64, names=(MODEL, OTHER))) as server:
        yield server


@pytest.fixture
def client(mock: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(mock.url) as client:
        yield client
