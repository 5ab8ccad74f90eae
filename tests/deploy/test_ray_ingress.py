"""The ingress around replicas that the test plays itself: what clients get when replicas fail."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Callable, Optional, Union

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from glm_multiuser.server.app import wrap_middleware
from glm_multiuser.server.errors import APIError, error_response
from glm_multiuser.server.settings import Limits
from tests.engine.mock_runner import Call
from tests.server.asking import KEYS, RED, events_of, long_prompts
from tests.server.in_process import PATIENCE, mock_llm, mock_settings

if sys.version_info < (3, 10):
    pytest.skip("Ray Serve needs Python 3.10", allow_module_level=True)

from glm_multiuser.deploy import ray_ingress
from glm_multiuser.deploy.ray_ingress import ATTEMPTS, Ingress
from glm_multiuser.deploy.ray_replica import Replica, ReplicaRequest, ReplicaResponse
from glm_multiuser.deploy.ray_response import ReplicaLost
from glm_multiuser.deploy.ray_route import Route

DIES = "dies"
Says = Union[Response, str]


class FakeReplicas:
    """Replicas by name. A request goes to its holder, else to the first that is not avoided.

    Args:
        replicas: what each one answers; `DIES`, or a stream that ends with it: it dies there.
    """

    def __init__(self, **replicas: Callable[[], Says]) -> None:
        self.replicas = replicas
        self.routes: list[Route] = []

    async def send(
        self, request: ReplicaRequest, route: Route
    ) -> AsyncGenerator[list[Message], None]:
        self.routes.append(route)
        free = [name for name in self.replicas if name not in route.excluded]
        name = route.holder if route.holder in self.replicas else (free or list(self.replicas))[0]
        if request.holder not in ("", name):
            said: Says = error_response("/llm/generate", APIError(410, "replica_ended", "gone"))
        else:
            said = self.replicas[name]()
        if said == DIES:
            del self.replicas[name]
            raise ReplicaLost
        assert isinstance(said, Response)
        said.headers["x-replica"] = name
        messages: asyncio.Queue[Message] = asyncio.Queue()
        await said({"type": "http", **request.scope}, _never, messages.put)
        while not messages.empty():
            message = messages.get_nowait()
            if message.get("body") == DIES.encode():
                del self.replicas[name]
                raise ReplicaLost
            yield [message]

    async def broadcast(self, request: ReplicaRequest) -> Sequence[ReplicaResponse]:
        raise AssertionError("no test broadcasts")


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def visit(
    replicas: FakeReplicas,
    *asks: tuple[str, Any],
    headers: Optional[dict[str, str]] = None,
    **limits: Any,
) -> list[httpx.Response]:
    """Asks one after the other, through the guard."""
    settings = mock_settings(keys=KEYS, limits=limits)
    ingress = Ingress(replicas, Limits(**limits))
    app = wrap_middleware(ingress, settings, ingress.metrics.record_response)

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            sent = {**RED, **(headers or {})}
            return [await client.post(path, json=body, headers=sent) for path, body in asks]

    return asyncio.run(run())


def says(text: str, status: int = 200) -> Callable[[], Response]:
    return lambda: JSONResponse({"said": text}, status)


def refuses(status: int, code: str) -> Callable[[], Response]:
    error = APIError(status, code, "not now", retry_after=3.0)
    return lambda: error_response("/v1/completions", error)


def streams(*parts: str) -> Callable[[], Response]:
    async def body() -> AsyncGenerator[str, None]:
        for part in parts:
            yield part

    return lambda: StreamingResponse(body(), media_type="text/event-stream")


CHAT = ("/v1/chat/completions", {"user": "u"})


def test_a_request_of_which_nothing_was_handed_out_goes_to_another_replica() -> None:
    (answer,) = visit(FakeReplicas(a=lambda: DIES, b=says("b")), CHAT)
    assert answer.json() == {"said": "b"}


def test_a_stream_that_had_not_begun_goes_to_another_replica() -> None:
    replicas = FakeReplicas(a=streams(DIES), b=streams("data: {}\n\n"))
    (answer,) = visit(replicas, CHAT)
    assert answer.text == "data: {}\n\n"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/completions", {"error": {"type": "server_error", "param": None}}),
        ("/v2/models/m/generate_stream", {"code": "replica_ended"}),
        ("/v1/messages", {"error": {"type": "api_error"}}),
        ("/v1/responses", {"error": {"type": "server_error", "param": None}}),
        ("/", {"code": "replica_ended", "status": 502}),
    ],
)
def test_a_stream_that_is_cut_ends_with_an_error_event(path: str, error: dict[str, Any]) -> None:
    replicas = FakeReplicas(a=streams('data: {"delta": "x"}\n\n', DIES), b=says("never"))
    (answer,) = visit(replicas, (path, {}))
    first, last = events_of(answer.text)
    assert first == {"delta": "x"}
    assert "the replica of this response has ended" in json.dumps(last)
    assert ("event: error\n" in answer.text) == path.startswith(("/v1/messages", "/v1/responses"))
    if isinstance(error.get("error"), dict):
        last, error = last["error"], {**error["error"], "code": "replica_ended"}
    assert {**last, **error} == last


def test_what_is_whole_is_not_sent_again_when_its_replica_dies_after_it() -> None:
    class DiesAfter(FakeReplicas):
        async def send(
            self, request: ReplicaRequest, route: Route
        ) -> AsyncGenerator[list[Message], None]:
            async for messages in super().send(request, route):
                yield messages
            raise ReplicaLost

    (answer,) = visit(DiesAfter(a=says("a")), CHAT)
    assert answer.json() == {"said": "a"}


@pytest.mark.parametrize("status_code", [(429, "queue_full"), (503, "model_not_ready")])
def test_a_full_or_ending_replica_passes_on(status_code: tuple[int, str]) -> None:
    replicas = FakeReplicas(a=refuses(*status_code), b=says("b"))
    (answer,) = visit(replicas, CHAT)
    assert answer.json() == {"said": "b"}
    assert replicas.routes == [Route("red/u"), Route("red/u", excluded=("a",))]


@pytest.mark.parametrize("needed", [{"store": True}, {"previous_response_id": "resp_1"}])
def test_a_full_replica_keeps_what_needs_its_stored_responses(needed: dict[str, Any]) -> None:
    """Elsewhere `previous_response_id` is unknown: 400, which no client sends again."""
    replicas = FakeReplicas(a=refuses(429, "queue_full"), b=says("b"))
    ask = ("/v1/responses", {"user": "u", **needed})
    (answer,) = visit(replicas, ask)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    (answer,) = visit(FakeReplicas(a=refuses(503, "shutting_down"), b=says("b")), ask)
    assert answer.json() == {"said": "b"}


def test_when_all_are_full_their_own_refusal_is_the_answer() -> None:
    replicas = FakeReplicas(a=refuses(429, "queue_full"), b=refuses(429, "queue_full"))
    (answer,) = visit(replicas, CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "queue_full"
    assert len(replicas.routes) == ATTEMPTS


def test_a_session_with_too_many_requests_is_not_passed_on() -> None:
    replicas = FakeReplicas(a=refuses(429, "user_busy"), b=says("b"))
    (answer,) = visit(replicas, CHAT)
    assert answer.json()["error"]["code"] == "user_busy"


@pytest.mark.slow
def test_without_a_replica_it_is_503_in_our_shape() -> None:
    class NoReplica(FakeReplicas):
        async def send(
            self, request: ReplicaRequest, route: Route
        ) -> AsyncGenerator[list[Message], None]:
            raise ReplicaLost
            yield []

    openai, plain = visit(NoReplica(), CHAT, ("/", {}))
    for answer in (openai, plain):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
    assert openai.json()["error"]["code"] == plain.json()["code"] == "no_replica"


class Hanging(FakeReplicas):
    """Replicas that never answer."""

    async def send(
        self, request: ReplicaRequest, route: Route
    ) -> AsyncGenerator[list[Message], None]:
        await _never()
        yield []


@pytest.mark.parametrize(("given", "seconds"), [("0.01", "0.01"), ("7", "0.02"), ("x", "0.02")])
def test_a_replica_that_hangs_holds_a_request_until_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch, given: str, seconds: str
) -> None:
    monkeypatch.setattr(ray_ingress, "LATE_SECONDS", 0.0)
    headers = {"x-request-timeout": given}
    (answer,) = visit(Hanging(), CHAT, headers=headers, request_seconds=0.02)
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == f"no replica answered in {seconds} seconds"


def test_a_replica_answers_at_the_deadline_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def hold_decoding(call: Call) -> None:
        if call.kind == "decode":
            go_on.wait(PATIENCE)

    class One(FakeReplicas):
        async def send(
            self, request: ReplicaRequest, route: Route
        ) -> AsyncGenerator[list[Message], None]:
            async for messages in replica.stream(request):
                yield messages

    monkeypatch.setattr(ray_ingress, "LATE_SECONDS", PATIENCE)
    settings = mock_settings(keys=KEYS, warm_up=(), limits={"request_seconds": 0.05})
    replica = Replica("a", settings, partial(mock_llm, before=hold_decoding))
    app = wrap_middleware(Ingress(One(), settings.limits), settings, lambda status: None)

    async def run() -> httpx.Response:
        await replica.start()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": long_prompts(1)[0]}
            asking = asyncio.ensure_future(client.post("/", json=body, headers=RED))
            aborted: list[bool] = []
            while not (asking.done() or any(aborted)):
                await asyncio.sleep(0)
                running = replica.service._running.values()
                aborted = [one._error is not None for one, _ in running]
            go_on.set()
            answer = await asking
        await replica.close()
        return answer

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert answer.json()["error"] == "the request took more than 0.05 seconds"
    assert b'outcome="deadline_exceeded"} 1.0' in replica.service.metrics.text()


def test_the_limit_of_a_key_holds_for_all_replicas_together() -> None:
    held = asyncio.Event()

    class Holding(FakeReplicas):
        async def send(
            self, request: ReplicaRequest, route: Route
        ) -> AsyncGenerator[list[Message], None]:
            await held.wait()
            async for messages in super().send(request, route):
                yield messages

    settings = mock_settings(keys=KEYS)
    limits = Limits(requests_per_key=2)
    app = wrap_middleware(Ingress(Holding(a=says("a")), limits), settings, lambda status: None)

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            request = [
                asyncio.ensure_future(client.post("/v1/completions", json={}, headers=RED))
                for _ in range(3)
            ]
            done, _ = await asyncio.wait(request, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            held.set()
            return list(await asyncio.gather(*request))

    answers = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
    (refused,) = [answer for answer in answers if answer.status_code == 429]
    assert refused.json()["error"]["code"] == "key_busy"
    assert "retry-after" in refused.headers


def test_a_stored_response_is_looked_for_where_its_session_is() -> None:
    replicas = FakeReplicas(a=says("a"))
    app = Ingress(replicas, Limits())

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for method in ("GET", "DELETE"):
                for headers in ({"x-session-id": "me"}, {}):
                    await client.request(method, "/v1/responses/resp_1", headers=headers)

    asyncio.run(run())
    assert [route.user for route in replicas.routes] == ["anonymous/me", ""] * 2


def test_a_generation_of_the_step_api_never_begins_anew_elsewhere() -> None:
    step = ("/llm/generate", {"cache_id": "c", "query": "q"})
    replicas = FakeReplicas(a=lambda: said.pop(0), b=says("b"))
    said: list[Says] = [JSONResponse({"flag": "sending"}), DIES]
    first, second = visit(replicas, step, step)
    assert first.status_code == 200
    assert (second.status_code, second.json()["code"]) == (410, "replica_ended")
    assert replicas.routes[1] == Route("red/c", holder="a")
