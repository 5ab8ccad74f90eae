"""Which server is tested: one that runs somewhere, or our own, started for these tests.

V2_URL      of a KServe v2 server, http://HOST:PORT; without it, our own is started
V2_MODEL    whose tensors are those that `asking.py` describes; default: glm-tiny
V2_CONTROL  1 if the tests may load and unload the model; default: 1 for our own, else 0
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import tritonclient.http

from tests.conformance.asking import Target
from tests.server.process import MODEL, ServerProcess


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """The server and its model."""
    url, model = os.environ.get("V2_URL"), os.environ.get("V2_MODEL", MODEL)
    if url:
        return Target(url.rstrip("/"), model, os.environ.get("V2_CONTROL", "0") == "1", own=False)
    own: ServerProcess = request.getfixturevalue("server")
    return Target(own.url, model, os.environ.get("V2_CONTROL", "1") == "1", own=True)


@pytest.fixture
def client(target: Target) -> Iterator[tritonclient.http.InferenceServerClient]:
    """The official client."""
    with tritonclient.http.InferenceServerClient(target.address, concurrency=4) as client:
        yield client


@pytest.fixture
def controlled(target: Target) -> None:
    """Skips a test that loads or unloads the model where it must not."""
    if not target.control:
        pytest.skip("V2_CONTROL is not 1: the model of this server must stay loaded")
