"""Third-party clients; `make clients` installs them and runs this file."""

from __future__ import annotations

import pytest

from tests.clients.running import (
    CLIENTS,
    STRUCTURED,
    missing,
    recording_server,
    run_client,
    run_structured,
)
from tests.structured.random_model import brief_llm


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_the_usual_flow(client: str) -> None:
    """Two turns, and a tool whose result the model says."""
    reason = missing(client)
    if reason:
        pytest.skip(reason)
    with recording_server() as (server, requests):
        answers = run_client(client, server.url)
    first = "And you?" if client in ("java", "curl") else "08:30"
    assert answers == [first, "And you?"]
    assert len(requests) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("client", STRUCTURED)
def test_structured_output(client: str) -> None:
    reason = missing(client)
    if reason:
        pytest.skip(reason)
    with recording_server(brief_llm) as (server, requests):
        assert run_structured(client, server.url) == STRUCTURED[client]
    assert len(requests) == len(STRUCTURED[client])
