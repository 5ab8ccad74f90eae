"""The OpenAPI schema is correct: a fuzzer that knows only the schema finds no contradiction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.asking import get
from tests.server.in_process import PATIENCE, InProcessServer, in_process_server, mock_settings

CONFIG = Path(__file__).with_name("schemathesis.toml")
PHASES = {
    "fuzzing": 3,
    "coverage": 1,  # each limit of each field, and what lies behind it: 7,000 requests
}
"""With how many examples of each operation."""
CHANGES_MODELS = "^/v2/repository/models/"
"""Fuzzed last and alone: after an unload every other call rightly answers 503."""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 10), reason="its schemathesis knows fewer checks")
@pytest.mark.parametrize("phases", ["fuzzing", pytest.param("coverage", marks=pytest.mark.rare)])
def test_requests_made_from_the_description_find_no_contradiction(
    phases: str, tmp_path: Path
) -> None:
    limits = {"requests_per_user": 256, "step_entries": 4096}
    # It would wait for generations of the step API, with which nobody goes on.
    settings = mock_settings(users=4, max_queue=256, limits=limits, drain_seconds=0.0)
    with in_process_server(settings) as server:
        schemathesis(server, tmp_path, phases, "--exclude-path-regex", CHANGES_MODELS)
        schemathesis(server, tmp_path, phases, "--include-path-regex", CHANGES_MODELS)


def schemathesis(server: InProcessServer, folder: Path, phases: str, *arguments: str) -> None:
    """Runs its command, which ends with 0 when it has found nothing."""
    options = ("--workers", "1", "--generation-deterministic", "--no-color")
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("--config-file", str(CONFIG)),
            *("run", f"{server.url}/openapi.json", "--max-examples", str(PHASES[phases])),
            *("--phases", phases, *options, *arguments),
            *("--request-timeout", str(PATIENCE)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_every_path_of_every_protocol_is_described() -> None:
    with in_process_server() as server:
        described, version = (get(server, path).json() for path in ("/openapi.json", "/version"))
    assert described["info"]["version"] == version["version"]
    paths = described["paths"]
    assert {"/", "/llm/generate", "/status", "/metrics", "/v1/chat/completions"} <= set(paths)
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= set(paths)
    assert {"/v1/responses", "/v1/responses/{response_id}"} <= set(paths)
    assert {"/v2/health/ready", "/v2/models/{name}/infer"} <= set(paths)
    assert {"/health", "/ping", "/version", "/tokenize", "/detokenize"} <= set(paths)
