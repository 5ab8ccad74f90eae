"""Every client example works as documented, against the real server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.asking import ask
from tests.server.in_process import in_process_server, mock_settings
from tests.server.process import ROOT, ServerProcess

EXAMPLES = sorted((ROOT / "examples" / "clients").glob("*.py"))
PATIENCE = 120.0
KEY = "a-key-0123456789"


def run(example: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Triton's client wants no scheme.
    place = url.partition("://")[2] if example.stem == "triton_client" else url
    return subprocess.run(
        [sys.executable, str(example), "--url", place, *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )


def test_all_protocols_have_an_example() -> None:
    assert {example.stem for example in EXAMPLES} == {
        "openai_client",
        "simple_client",
        "step_client",
        "triton_client",
    }


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_as_it_stands(example: Path, server: ServerProcess) -> None:
    ended = run(example, server.url)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "你好" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple_client", "step_client"])
def test_an_example_shows_the_conversation(name: str, server: ServerProcess) -> None:
    (example,) = (one for one in EXAMPLES if one.stem == name)
    shown = run(example, server.url).stdout
    found = re.fullmatch(
        r"> 你好\n(.+?)\n\n> Who are you\?\n(.+?)\n\n(?:\(stop\)\n)?", shown, re.DOTALL
    )
    assert found, shown
    # The checkpoint's defaults are greedy, so the answers are always these.
    first = ask(server, "你好").json()
    second = ask(server, "Who are you?", history=first["history"]).json()
    assert found.groups() == (first["response"], second["response"])


@pytest.mark.parametrize("name", ["openai_client", "simple_client", "step_client"])
def test_an_address_may_end_with_a_slash(name: str) -> None:
    (example,) = (one for one in EXAMPLES if one.stem == name)
    with in_process_server(mock_settings()) as server:
        ended = run(example, f"{server.url}/")
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", ["simple_client", "step_client"])
def test_an_example_with_a_key_and_without_and_without_a_server(name: str) -> None:
    (example,) = (one for one in EXAMPLES if one.stem == name)
    with in_process_server(mock_settings(keys={"me": KEY})) as locked:
        allowed = run(example, locked.url, "--api-key", KEY)
        refused = run(example, locked.url)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(locked.url.rpartition(":")[2])))  # so no other server listens
        without_server = run(example, locked.url)
    assert (allowed.returncode, allowed.stderr) == (0, "")
    assert (refused.returncode, without_server.returncode) == (1, 1)
    assert refused.stderr.startswith("error: ")
    assert "an API key is needed" in refused.stderr
    assert without_server.stderr.startswith(f"error: {locked.url}: ")
    assert refused.stdout.count("\n") == without_server.stdout.count("\n") <= 1
