"""Statistics, metadata and Triton's settings in this server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.stepping import SingleSteps
from tests.server.asking import get, post
from tests.server.in_process import MODEL, InProcessServer, in_process_server, mock_settings
from tests.server.kserve_asking import PATH, generate


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with in_process_server(mock_settings(names=(MODEL, "other"))) as server:
        yield server


def test_statistics_count_successes_failures_and_steps(server: InProcessServer) -> None:
    def statistics(name: str) -> Any:
        (one,) = get(server, f"/v2/models/{name}/stats").json()["model_stats"]
        return one

    before = statistics(MODEL)
    assert generate(server).status_code == 200
    post(server, f"{PATH}/generate", {"prompt": "hello", "max_token": 1})
    post(server, f"{PATH}/generate", {"prompt": "a" * 200})
    with SingleSteps():  # a step is counted after its tokens have gone out
        after = statistics(MODEL)
        steps = server.llm().stats().steps
    assert after["inference_count"] - before["inference_count"] == 2
    for kind, more in (("success", 2), ("fail", 1)):
        counts = [one["inference_stats"][kind]["count"] for one in (before, after)]
        assert counts[1] - counts[0] == more
    assert after["execution_count"] == steps > before["execution_count"]
    assert after["inference_stats"]["compute_infer"]["count"] == steps
    other = statistics("other")["inference_stats"]
    assert other["success"] == other["fail"] == {"count": 0}


def test_metadata_names_the_project(server: InProcessServer) -> None:
    assert get(server, "/v2").json()["name"] == "glm_multiuser"
    assert get(server, "/v2").json()["version"][0].isdigit()


def test_log_settings_are_what_is_logged(server: InProcessServer) -> None:
    root = logging.getLogger()
    level = root.level
    try:
        for chosen, shown in ((logging.INFO, (True, 0)), (logging.DEBUG, (True, 1))):
            root.setLevel(chosen)
            settings = get(server, "/v2/logging").json()
            assert (settings["log_info"], settings["log_verbose_level"]) == shown
        root.setLevel(logging.ERROR)
        settings = get(server, "/v2/logging").json()
        assert (settings["log_info"], settings["log_warning"]) == (False, False)
        assert settings["log_error"]
    finally:
        root.setLevel(level)


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting", f"{PATH}/trace/setting"])
def test_settings_are_fixed(server: InProcessServer, path: str) -> None:
    current = get(server, path).json()
    assert post(server, path, {}).json() == current
    assert post(server, path, current).json() == current
    for name in (*current, "nonsense"):
        reply = post(server, path, {name: "changed"})
        assert reply.status_code == 400
        assert repr(name) in reply.json()["error"]


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_shared_memory_is_refused(server: InProcessServer, kind: str) -> None:
    memory = f"/v2/{kind}sharedmemory"
    assert get(server, f"{memory}/status").json() == []
    assert get(server, f"{memory}/region/r/status").status_code == 400
    reply = post(server, f"{memory}/region/r/register", {"key": "/r", "byte_size": 1})
    assert reply.status_code == 400
    assert "shared memory is not read by this server" in reply.json()["error"]
    assert post(server, f"{memory}/region/r/unregister", {}).status_code == 200
    assert post(server, f"{memory}/unregister", {}).status_code == 200
