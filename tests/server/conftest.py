"""A server around a model in numpy, the official client of its OpenAI API, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest

from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.openai_reading import OTHER, sync_client

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def mock() -> Iterator[InProcessServer]:
    """One for all tests of a file; they leave it as it was."""
    with in_process_server(mock_settings(users=4, max_queue=64, names=(MODEL, OTHER))) as server:
        yield server


@pytest.fixture
def client(mock: InProcessServer) -> Iterator[openai.OpenAI]:
    with sync_client(mock.url) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, which `make browser` installs without a window: it takes two thirds of the time."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        pytest.skip("the page is tested in Chromium, and there is none on the PATH")
    # Imported here: most tests of the server need none of it.
    from playwright.sync_api import sync_playwright

    from tests.server.page_visit import ARGUMENTS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()
