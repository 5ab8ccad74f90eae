"""A replica that hangs without dying: the others answer for it, and it is named."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from glm_multiuser.server.app import wrap_middleware
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.settings import ServerSettings
from tests.server.in_process import MODEL, PATIENCE, mock_llm, mock_settings

if sys.version_info < (3, 10):
    pytest.skip("Ray Serve needs Python 3.10", allow_module_level=True)

from glm_multiuser.deploy.ray_ingress import Ingress
from glm_multiuser.deploy.ray_replica import Replica, ReplicaRequest, ReplicaResponse
from tests.deploy.test_ray_parts import make_request

LOAD = f"/v2/repository/models/{MODEL}/load"
READ = ("/status", "/metrics", "/v1/sessions", f"/v2/models/{MODEL}/stats")
PATHS = (*READ, "/v2/health/ready", LOAD)


class Handle:
    """What is used of Ray's `DeploymentHandle`: replicas have answered already, or hang.

    Args:
        answers: by path and replica.
    """

    def __init__(self, answers: dict[str, dict[str, ReplicaResponse]]) -> None:
        self.answers = answers
        self.hanging: set[str] = set()

    def broadcast(self, method: str, request: ReplicaRequest) -> Any:
        async def get(name: str, response: ReplicaResponse) -> ReplicaResponse:
            if name in self.hanging:
                await asyncio.Event().wait()
            return response

        async def results() -> list[Any]:
            answers = self.answers[request.scope["path"]].items()
            return [SimpleNamespace(get_async=partial(get, *one)) for one in answers]

        return SimpleNamespace(_fetch_replica_results_async=results)


@pytest.fixture
def ray_serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Late: what it imports must not come before MindSpore.
    pytest.importorskip("ray.serve.schema", reason="needs the extra [ray]")
    module = pytest.importorskip("glm_multiuser.deploy.ray_serve")
    monkeypatch.setattr(module, "STATUS_TIMEOUT_SECONDS", 0.1)
    return module


async def answers(settings: ServerSettings) -> dict[str, dict[str, ReplicaResponse]]:
    """Of three replicas, by path and replica."""
    replicas = [Replica(name, settings, mock_llm) for name in "abc"]
    for one in replicas:
        await one.start()
    asked = [make_request(path, b"", "POST" if path == LOAD else "GET") for path in PATHS]
    said: dict[str, dict[str, ReplicaResponse]] = {}
    for path, request in zip(PATHS, asked):
        said[path] = {one.name: await one.call(request) for one in replicas}
    for one in replicas:
        await one.close()
    return said


def test_the_others_answer(ray_serve: Any) -> None:
    settings = mock_settings(model_control="all", limits={"request_seconds": 0.1})

    async def run() -> None:
        handle: Any = Handle(await answers(settings))
        ingress = Ingress(ray_serve.RayReplicas(handle, settings), settings.limits)
        app = wrap_middleware(ingress, settings, ingress.metrics.record_response)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def status() -> tuple[list[str], list[str]]:
                said = (await client.get("/status")).raise_for_status().json()
                return said["replicas"], said["unanswered"]

            assert await status() == (["a", "b", "c"], [])
            handle.hanging = {"b"}
            for _ in range(2):
                assert await status() == (["a", "c"], ["b"])
            metrics = (await client.get("/metrics")).raise_for_status().text
            assert "glm_ingress_unanswered_replicas 1.0" in metrics
            assert 'replica="b"' not in metrics
            for path in (*READ, "/v2/health/ready"):
                assert (await client.get(path)).status_code == 200, path
            # Nobody knows whether it has done it.
            changed = await client.post(LOAD, json={})
            assert changed.status_code == 504
            assert "'b' did not answer in 0.1 seconds" in changed.json()["error"]
            handle.hanging = set("abc")
            nobody = await client.get("/status")
            assert (nobody.status_code, nobody.json()["code"]) == (504, "deadline_exceeded")

    asyncio.run(run())


def test_a_health_check_does_not_wait_for_it(
    ray_serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = mock_settings(model_control="all")

    async def run() -> None:
        handle: Any = Handle(await answers(settings))
        ingress = Ingress(ray_serve.RayReplicas(handle, settings), settings.limits)
        transport = httpx.ASGITransport(ingress)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            monkeypatch.setattr(ray_serve, "HEALTH_TIMEOUT_SECONDS", 0.01)
            monkeypatch.setattr(ray_serve, "STATUS_TIMEOUT_SECONDS", 2 * PATIENCE)
            handle.hanging = {"b"}
            asked = client.get("/v2/health/ready")
            assert (await asyncio.wait_for(asked, PATIENCE)).status_code == 200
            # Without one that is healthy, it does.
            monkeypatch.setattr(ray_serve, "STATUS_TIMEOUT_SECONDS", 0.1)
            handle.hanging = set("abc")
            assert (await client.get("/v2/health/ready")).status_code == 504

    asyncio.run(run())


def test_a_replica_that_was_never_heard_of(ray_serve: Any) -> None:
    async def run() -> None:
        handle: Any = Handle({"/status": {n: ReplicaResponse(n, 200, [], b"") for n in "ab"}})
        handle.hanging = {"b"}
        replicas = ray_serve.RayReplicas(handle, mock_settings())
        first, second = await replicas.broadcast(make_request("/status", b"", "GET"))
        assert (first.replica, second.replica, second.status) == ("a", "unknown", 504)
        assert json.loads(second.body)["error"].startswith("replica 'unknown' did not answer")

    asyncio.run(run())


def test_replicas_that_have_all_just_died(ray_serve: Any) -> None:
    async def run() -> None:
        handle: Any = Handle({"/status": {}})
        replicas = ray_serve.RayReplicas(handle, mock_settings())
        with pytest.raises(APIError) as caught:
            await replicas.broadcast(make_request("/status", b"", "GET"))
        assert (caught.value.status, caught.value.code) == (503, "no_replica")

    asyncio.run(run())
