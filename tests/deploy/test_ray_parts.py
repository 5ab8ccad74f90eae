"""A replica without Ray, whose user a request is, and answers made of several replicas'."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import sys
import threading
from collections import namedtuple
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send
from typer.testing import CliRunner

from glm_multiuser.cli.commands import app
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.run import listen
from glm_multiuser.server.settings import ServerSettings
from tests.engine.mock_runner import Call, MockRunner
from tests.server.asking import KEYS, RED, long_prompts
from tests.server.in_process import MODEL, PATIENCE, mock_llm, mock_settings

if sys.version_info < (3, 10):
    pytest.skip("Ray Serve needs Python 3.10", allow_module_level=True)

from glm_multiuser.deploy import ray_local
from glm_multiuser.deploy.ray_arguments import Scale, read_arguments
from glm_multiuser.deploy.ray_broadcast import IngressMetrics, is_broadcast, merge_responses
from glm_multiuser.deploy.ray_replica import Replica, ReplicaRequest, ReplicaResponse
from glm_multiuser.deploy.ray_route import Route, user_of

Version = namedtuple("Version", "major minor")
YAML = Path(__file__).resolve().parents[2] / "deploy/serve.yaml"


def make_request(path: str, body: Any, method: str = "POST", **headers: str) -> ReplicaRequest:
    given = {
        "host": "localhost",
        **RED,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    return ReplicaRequest(scope, body if isinstance(body, bytes) else json.dumps(body).encode())


INFER = {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1, 1], "data": ["ab"]}]}
MESSAGES = {"max_tokens": 9, "messages": [{"role": "user", "content": "ab"}]}
SEQUENCE = {"parameters": {"sequence_id": 7}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "user"),
    [
        (make_request("/v1/completions", {"prompt": "ab", "user": "u"}), "red/u"),
        (make_request("/v1/completions", {"prompt": "ab", "user": "u"}, x_session_id="h"), "red/h"),
        (make_request("/v1/completions", {"prompt": "ab"}), None),
        (make_request("/v1/completions", {"prompt": "ab"}, x_session_id="\u4f60"), "red/\u4f60"),
        (make_request("/v1/responses", {"input": "ab", "user": "u"}), "red/u"),
        (make_request("/v1/messages", {**MESSAGES, "metadata": {"user_id": "u"}}), "red/u"),
        (make_request("/v1/messages", MESSAGES, x_session_id="h"), "red/h"),
        (make_request("/", {"prompt": "ab"}, x_session_id="h"), "red/h"),
        (make_request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", **SEQUENCE}), "red/7"),
        (
            make_request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", "sequence_id": "s"}),
            "red/s",
        ),
        (make_request(f"/v2/models/{MODEL}/generate", {"prompt": "ab", "sequence_id": 0}), None),
        (
            make_request(
                f"/v2/models/{MODEL}/infer",
                gzip.compress(json.dumps({**INFER, **SEQUENCE}).encode()),
                content_encoding="gzip",
            ),
            "red/7",
        ),
    ],
)
def test_the_ingress_knows_the_user_as_the_replica_does(
    sent: ReplicaRequest, user: Optional[str]
) -> None:
    async def run() -> None:
        replica = Replica("a", mock_settings(keys=KEYS), mock_llm)
        await replica.start()
        try:
            answer = await replica.call(sent)
            assert answer.status == 200, answer.body
            slots = replica.service.models.get(None).llm.slots()
        finally:
            await replica.close()
        assert {slot.user for slot in slots if str(slot.user).startswith("red/")} == (
            {user} if user else set()
        )

    asyncio.run(run())
    headers = Headers(scope=sent.scope)
    found = user_of(sent.scope["path"], headers, sent.body, Caller("red"), 1 << 20)
    assert found == (user or "")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"user": 3, "metadata": 3}'])
def test_a_body_that_cannot_be_read_has_no_user(body: bytes) -> None:
    for path in ("/v1/completions", "/v1/messages", "/v2/models/m/infer", "/llm/generate"):
        user = user_of(path, Headers({}), body, Caller("red"), 1 << 20)
        assert user in ("", "red/None")


def test_a_route_survives_its_way() -> None:
    for route in (Route(), Route("red/\n\u4f60", "a"), Route("u").excluding("a").excluding("b")):
        assert Route.decode(route.encode()) == route
    assert Route.decode("") == Route()


def test_cancelling_an_answer_frees_its_slot() -> None:
    held, go_on = threading.Event(), threading.Event()
    go_on.set()

    def hold_decoding(call: Call) -> None:
        if call.kind == "decode" and not go_on.is_set():
            held.set()
            go_on.wait(PATIENCE)

    async def run() -> None:
        replica = Replica("a", mock_settings(keys=KEYS), partial(mock_llm, before=hold_decoding))
        await replica.start()
        go_on.clear()
        try:
            body = {"prompt": long_prompts(1)[0], "stream": True}
            answer = replica.stream(make_request("/v1/completions", body))
            first = await answer.__anext__()
            assert first[0]["status"] == 200
            await asyncio.to_thread(held.wait, PATIENCE)
            assert replica.service.running == 1
            await asyncio.wait_for(answer.aclose(), PATIENCE)
            assert replica.service.running == 0
        finally:
            go_on.set()
            await replica.close()

    asyncio.run(run())


def test_a_replica_that_does_not_hold_a_generation_says_so() -> None:
    async def run() -> ReplicaResponse:
        replica = Replica("b", mock_settings(keys=KEYS), mock_llm)
        await replica.start()
        try:
            request = make_request("/llm/generate", {"cache_id": "c", "query": "ab"})
            return await replica.call(ReplicaRequest(request.scope, request.body, holder="a"))
        finally:
            await replica.close()

    answer = asyncio.run(run())
    assert answer.status == 410
    assert "'a'" in json.loads(answer.body)["error"]


def test_answers_of_everyone() -> None:
    paths = ["/metrics", "/status", f"/v2/models/{MODEL}/stats"]

    async def run() -> dict[str, list[ReplicaResponse]]:
        settings = mock_settings(keys=KEYS, model_control="all")
        replicas = [Replica(name, settings, mock_llm) for name in "ab"]
        said: dict[str, list[ReplicaResponse]] = {}
        await replicas[0].start()
        said["one starts"] = [
            await one.call(make_request("/v2/health/ready", b"", "GET")) for one in replicas
        ]
        await replicas[1].start()
        try:
            for one in replicas:
                await one.call(make_request("/", {"prompt": "ab"}))
            for path in paths:
                request = make_request(path, b"", "GET")
                said[path] = [await one.call(request) for one in replicas]
            unload = make_request(f"/v2/repository/models/{MODEL}/unload", {})
            said["unload"] = [await one.call(unload) for one in replicas]
        finally:
            for one in replicas:
                await one.close()
        return said

    said = asyncio.run(run())
    assert (
        merge_responses("/v2/health/ready", said["one starts"], IngressMetrics()).status_code == 200
    )
    none = [said["one starts"][1]] * 2
    assert merge_responses("/v2/health/ready", none, IngressMetrics()).status_code == 503

    text = bytes(merge_responses("/metrics", said["/metrics"], IngressMetrics()).body).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE glm_requests_total counter") == 1
    ended = {
        sample.labels["replica"]: sample.value
        for sample in families["glm_requests"].samples
        if sample.name == "glm_requests_total"
    }
    assert ended == {"a": 1, "b": 1}

    status = json.loads(bytes(merge_responses("/status", said["/status"], IngressMetrics()).body))
    assert [slot["slot"] for slot in status["slots"]] == [0, 1, 2, 3]
    assert [slot["replica"] for slot in status["slots"]] == ["a", "a", "b", "b"]
    assert (status["totals"]["requests"], status["models"][0]["users"]) == (2, 4)
    assert status["cache_bytes"]["reserved"] == 4 * MockRunner.cache_bytes_per_user

    path = f"/v2/models/{MODEL}/stats"
    (counts,) = json.loads(bytes(merge_responses(path, said[path], IngressMetrics()).body))[
        "model_stats"
    ]
    assert (counts["name"], counts["inference_count"]) == (MODEL, 2)

    changed = merge_responses("/v2/repository/models/m/unload", said["unload"], IngressMetrics())
    assert (changed.status_code, json.loads(bytes(changed.body))) == (200, {})
    worst = merge_responses(
        "/v2/repository/models/m/load", [said["unload"][0], none[0]], IngressMetrics()
    )
    assert worst.status_code == 503


def test_which_requests_concern_everyone() -> None:
    everyone = [("GET", "/metrics"), ("POST", "/v2/repository/models/m/load")]
    one = [("POST", "/metrics"), ("GET", "/"), ("POST", "/v2/repository/index")]
    assert all(is_broadcast(*request) for request in everyone)
    assert not any(is_broadcast(*request) for request in one)


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
    settings, scale = read_arguments(described.args)
    assert settings.limits.requests_per_key == 512
    assert scale == Scale(2, 8, 4)


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, "1"), (2.0, "2"), (2.5, "2")])
def test_a_replica_has_a_thread_for_each_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, cpus: float, threads: str
) -> None:
    pytest.importorskip("ray.serve", reason="needs the extra [ray]")
    from glm_multiuser.deploy.ray_serve import _environment

    monkeypatch.delenv("GLM_MULTIUSER_THREADS", raising=False)
    assert _environment(cpus)["GLM_MULTIUSER_THREADS"] == threads
    monkeypatch.setenv("GLM_MULTIUSER_THREADS", "7")
    assert _environment(cpus)["GLM_MULTIUSER_THREADS"] == "7"


def test_a_client_that_disconnects_while_it_sends_is_no_failure() -> None:
    """Ray's proxy raises this from `receive`; the guard would log it with a traceback."""
    pytest.importorskip("ray.serve", reason="needs the extra [ray]")
    from ray.exceptions import TaskCancelledError

    from glm_multiuser.deploy.ray_serve import _behind_proxy

    received: list[Message] = []

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())

    async def cancelled() -> Message:
        raise TaskCancelledError

    async def send(message: Message) -> None:
        pytest.fail("a response to nobody")

    async def ask() -> None:
        await _behind_proxy(inside)({"type": "http"}, cancelled, send)

    asyncio.run(ask())
    assert received == [{"type": "http.disconnect"}]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "checkpoint"),
        ({"checkpoint": "m", "userz": 3}, "userz: unknown field"),
        ({"checkpoint": "m", "users": 0}, "users"),
        ({"checkpoint": "m", "limits": {"sky": 1}}, "sky"),
        ({"checkpoint": "m", "replicas": 0}, "replicas"),
        ({"checkpoint": "m", "replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"checkpoint": "m", "cpus": 0}, "cpus"),
        ({"checkpoint": "m", "weight_cache": False}, "weight_cache: .*string, not False"),
        ({"checkpoint": "m", "limits": {"choices": "two"}}, r"limits\.choices: .*, not 'two'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_arguments(arguments)


def test_a_size_may_be_a_number_of_bytes() -> None:
    settings, _ = read_arguments({"checkpoint": "m", "cache_memory": 8 << 20})
    assert settings.models[0].engine.cache_limit == 8 << 20


def test_a_stop_while_the_replicas_start_does_not_call_them_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stopped(settings: ServerSettings, scale: Scale, end: threading.Event) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert end.is_set()

    monkeypatch.setattr(ray_local, "local_ray", lambda host, port, cores: nullcontext())
    monkeypatch.setattr(ray_local, "deploy", stopped)
    monkeypatch.setattr(ray_local, "drain", lambda seconds: None)
    with caplog.at_level("INFO"):
        ray_local.serve_replicas(mock_settings(), 2, listen("127.0.0.1", 0))
    assert [one.getMessage() for one in caplog.records] == ["draining", "ended"]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'glm-multiuser\[ray\]'"):
        ray_local.require_ray()


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 9))
    with pytest.raises(ConfigError, match=r"needs Python 3\.10 or newer; this is 3\.9"):
        ray_local.require_ray()


def test_a_device_of_all_replicas_is_refused() -> None:
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--device-id", "1"])
    assert result.exit_code == 2
    assert "--device-id is 1" in result.stderr
