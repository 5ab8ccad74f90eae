"""A replica without Ray, whose user a request is, and answers made of several replicas'."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, Optional

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from typer.testing import CliRunner

from glm_multiuser.cli import app
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.keys import Caller
from tests.server.asking import KEYS, RED, long_prompts
from tests.server.in_process import MODEL, mock_llm, mock_settings

if sys.version_info < (3, 10):
    pytest.skip("Ray Serve needs Python 3.10", allow_module_level=True)

from glm_multiuser.deploy.ray_arguments import Arguments, Scale
from glm_multiuser.deploy.ray_everyone import DoorMetrics, answer_of_all, asks_everyone
from glm_multiuser.deploy.ray_local import need_ray
from glm_multiuser.deploy.ray_replica import Answered, Asked, Replica
from glm_multiuser.deploy.ray_route import Route, user_of

Version = namedtuple("Version", "major minor")
YAML = Path(__file__).resolve().parents[2] / "deploy/serve.yaml"


def request(path: str, body: Any, method: str = "POST", **headers: str) -> Asked:
    given = {**RED, **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    return Asked(scope, body if isinstance(body, bytes) else json.dumps(body).encode())


INFER = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["ab"]}]}
SEQUENCE = {"parameters": {"sequence_id": 7}}


@pytest.mark.parametrize(
    ("asked", "user"),
    [
        (request("/v1/completions", {"prompt": "ab", "user": "u"}), "red/u"),
        (request("/v1/completions", {"prompt": "ab", "user": "u"}, x_session_id="h"), "red/h"),
        (request("/v1/completions", {"prompt": "ab"}), None),
        (request("/", {"prompt": "ab"}, x_session_id="h"), "red/h"),
        (request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", **SEQUENCE}), "red/7"),
        (request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", "sequence_id": "s"}), "red/s"),
        (request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", "sequence_id": 0}), None),
        (
            request(
                f"/v2/models/{MODEL}/infer",
                gzip.compress(json.dumps({**INFER, **SEQUENCE}).encode()),
                content_encoding="gzip",
            ),
            "red/7",
        ),
    ],
)
def test_the_door_knows_the_user_as_the_replica_does(asked: Asked, user: Optional[str]) -> None:
    async def run() -> None:
        replica = Replica("a", mock_settings(keys=KEYS), mock_llm)
        await replica.start()
        try:
            answer = await replica.answer_whole(asked)
            assert answer.status == 200, answer.body
            slots = replica.service.models.get(None).llm.slots()
        finally:
            await replica.close()
        assert {slot.user for slot in slots if str(slot.user).startswith("red/")} == (
            {user} if user else set()
        )

    asyncio.run(run())
    headers = Headers(scope=asked.scope)
    found = user_of(asked.scope["path"], headers, asked.body, Caller("red"), 1 << 20)
    assert found == (user or "")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"user": 3}'])
def test_a_body_that_cannot_be_read_has_no_user(body: bytes) -> None:
    for path in ("/v1/completions", "/v2/models/m/infer", "/llm/generate"):
        user = user_of(path, Headers({}), body, Caller("red"), 1 << 20)
        assert user in ("", "red/None")


def test_a_route_survives_its_way() -> None:
    for route in (Route(), Route("red/\n\u4f60", "a"), Route("u").avoiding("a").avoiding("b")):
        assert Route.decode(route.encode()) == route
    assert Route.decode("") == Route()


def test_cancelling_an_answer_frees_its_slot() -> None:
    async def run() -> None:
        replica = Replica("a", mock_settings(keys=KEYS), mock_llm)
        await replica.start()
        try:
            body = {"prompt": long_prompts(1)[0], "stream": True}
            answer = replica.answer(request("/v1/completions", body))
            first = await answer.__anext__()
            assert first[0]["status"] == 200
            assert replica.service.running == 1
            await answer.aclose()
            assert replica.service.running == 0
        finally:
            await replica.close()

    asyncio.run(run())


def test_a_replica_that_does_not_hold_a_generation_says_so() -> None:
    async def run() -> Answered:
        replica = Replica("b", mock_settings(keys=KEYS), mock_llm)
        await replica.start()
        try:
            asked = request("/llm/generate", {"cache_id": "c", "query": "ab"})
            return await replica.answer_whole(Asked(asked.scope, asked.body, holder="a"))
        finally:
            await replica.close()

    answer = asyncio.run(run())
    assert answer.status == 410
    assert "'a'" in json.loads(answer.body)["error"]


def test_answers_of_everyone() -> None:
    paths = ["/metrics", "/status", f"/v2/models/{MODEL}/stats"]

    async def run() -> dict[str, list[Answered]]:
        replicas = [Replica(name, mock_settings(keys=KEYS), mock_llm) for name in "ab"]
        said: dict[str, list[Answered]] = {}
        await replicas[0].start()
        said["one starts"] = [
            await one.answer_whole(request("/v2/health/ready", b"", "GET")) for one in replicas
        ]
        await replicas[1].start()
        try:
            for one in replicas:
                await one.answer_whole(request("/", {"prompt": "ab"}))
            for path in paths:
                asked = request(path, b"", "GET")
                said[path] = [await one.answer_whole(asked) for one in replicas]
            unload = request(f"/v2/repository/models/{MODEL}/unload", {})
            said["unload"] = [await one.answer_whole(unload) for one in replicas]
        finally:
            for one in replicas:
                await one.close()
        return said

    said = asyncio.run(run())
    assert answer_of_all("/v2/health/ready", said["one starts"], DoorMetrics()).status_code == 200
    none = [said["one starts"][1]] * 2
    assert answer_of_all("/v2/health/ready", none, DoorMetrics()).status_code == 503

    text = bytes(answer_of_all("/metrics", said["/metrics"], DoorMetrics()).body).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE glm_requests_total counter") == 1
    ended = {
        sample.labels["replica"]: sample.value
        for sample in families["glm_requests"].samples
        if sample.name == "glm_requests_total"
    }
    assert ended == {"a": 1, "b": 1}

    status = json.loads(answer_of_all("/status", said["/status"], DoorMetrics()).body)
    assert [slot["slot"] for slot in status["slots"]] == [0, 1, 2, 3]
    assert [slot["replica"] for slot in status["slots"]] == ["a", "a", "b", "b"]
    assert (status["totals"]["requests"], status["models"][0]["users"]) == (2, 4)

    path = f"/v2/models/{MODEL}/stats"
    (counts,) = json.loads(answer_of_all(path, said[path], DoorMetrics()).body)["model_stats"]
    assert (counts["name"], counts["inference_count"]) == (MODEL, 2)

    changed = answer_of_all("/v2/repository/models/m/unload", said["unload"], DoorMetrics())
    assert (changed.status_code, json.loads(changed.body)) == (200, {})
    worst = answer_of_all(
        "/v2/repository/models/m/load", [said["unload"][0], none[0]], DoorMetrics()
    )
    assert worst.status_code == 503


def test_which_requests_concern_everyone() -> None:
    everyone = [("GET", "/metrics"), ("POST", "/v2/repository/models/m/load")]
    one = [("POST", "/metrics"), ("GET", "/"), ("POST", "/v2/repository/index")]
    assert all(asks_everyone(*asked) for asked in everyone)
    assert not any(asks_everyone(*asked) for asked in one)


def test_the_file_for_a_cluster_builds() -> None:
    yaml = pytest.importorskip("yaml")
    schema = pytest.importorskip("ray.serve.schema", reason="needs the extra [ray]")
    from ray.serve import Application

    from glm_multiuser.deploy import ray_serve

    said = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    (described,) = schema.ServeDeploySchema.model_validate(said).applications
    module, _, name = described.import_path.partition(":")
    assert (module, getattr(ray_serve, name)) == (ray_serve.__name__, ray_serve.build)
    assert isinstance(ray_serve.build(described.args), Application)
    arguments = Arguments.read(described.args)
    assert arguments.settings().limits.requests_per_key == 512
    assert arguments.scale() == Scale(2, 8, 4)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "checkpoint"),
        ({"checkpoint": "m", "userz": 3}, "userz"),
        ({"checkpoint": "m", "users": 0}, "users"),
        ({"checkpoint": "m", "limits": {"sky": 1}}, "sky"),
        ({"checkpoint": "m", "replicas": 0}, "replicas"),
        ({"checkpoint": "m", "replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"checkpoint": "m", "cpus": 0}, "cpus"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], word: str) -> None:
    def read() -> None:
        found = Arguments.read(arguments)
        found.settings()
        found.scale()

    with pytest.raises(ConfigError, match=word):
        read()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'glm-multiuser\[ray\]'"):
        need_ray()


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 9))
    with pytest.raises(ConfigError, match=r"needs Python 3\.10 or newer; this is 3\.9"):
        need_ray()


def test_a_device_of_all_replicas_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--device-id", "1"])
    assert result.exit_code == 2
    assert "--device-id is 1" in result.stderr
