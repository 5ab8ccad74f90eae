"""A browser, and servers whose page it visits: one with a model in numpy, one with glm-tiny."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest

from tests.conftest import ARGUMENTS
from tests.server.held_steps import server_to_hold
from tests.server.in_process import InProcessServer
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.server.page.visit import Visit


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, which `make browser` installs without a window: it takes two thirds of the time."""
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        pytest.skip("the page is tested in Chromium, and there is none on the PATH")
    # Imported here: most tests of the server need none of it.
    from playwright.sync_api import sync_playwright

    from tests.server.page.visit import ARGUMENTS

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="session")
def server(steps: Path) -> Iterator[ServerProcess]:
    """With glm-tiny."""
    with server_to_hold(steps, *ARGUMENTS) as process:
        yield process


@pytest.fixture
def url(mock: InProcessServer) -> str:
    """Of the server that is visited; files with tests of the other one say so."""
    return mock.url


@pytest.fixture
def visitor(browser: Browser, url: str) -> Iterator[Callable[..., Visit]]:
    # Imported here: without a browser there may be no Playwright.
    from tests.server.page.visit import visitors

    with visitors(browser, url) as come:
        yield come


@pytest.fixture
def visit(visitor: Callable[..., Visit]) -> Visit:
    return visitor()
