"""The ingress: routes requests to replicas and retries when one dies. Independent of Ray."""

from __future__ import annotations

import asyncio
import http
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from glm_multiuser.deploy.ray_broadcast import IngressMetrics, is_broadcast, merge_responses
from glm_multiuser.deploy.ray_replica import ReplicaRequest, ReplicaResponse
from glm_multiuser.deploy.ray_response import Rejected, RelayedResponse, ReplicaLost
from glm_multiuser.deploy.ray_route import STEP_PATH, STORED_PATH, Route, is_stored, user_of
from glm_multiuser.server.admission import Admission
from glm_multiuser.server.errors import APIError, error_response
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.logs import request_id
from glm_multiuser.server.request_context import deadline_in
from glm_multiuser.server.request_log import HEADER as REQUEST_ID_HEADER
from glm_multiuser.server.settings import Limits

ATTEMPTS = 3
"""Replicas tried until a response has started; few, because the request itself may kill them."""
LATE_SECONDS = 2.0
"""From the deadline of a request, at which its replica answers 504, to the ingress's own 504."""
PAUSE_SECONDS = 0.25
"""Linear backoff after a replica has died, because Ray notices it with a delay."""
HOLDERS_MAX = 8192
"""Maximum number of step API generations whose replica is remembered."""
FORWARDED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")


class Replicas(Protocol):
    """Transport from the ingress to the replicas."""

    def send(self, request: ReplicaRequest, route: Route) -> AsyncGenerator[list[Message], None]:
        """Sends a request to one replica; yields the messages of its response.

        Raises:
            ReplicaLost: it died.
            APIError: no replica is available.
        """

    async def broadcast(self, request: ReplicaRequest) -> Sequence[ReplicaResponse]:
        """Returns the responses of all available replicas.

        Raises:
            APIError: no replica is available.
        """


class Ingress:
    """ASGI application inside the middleware; it holds no model.

    Args:
        replicas: transport to the replicas.
        limits: per client, as for a single server.
    """

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self.metrics = IngressMetrics()
        self._replicas = replicas
        self._limits = limits
        self._admission = Admission(limits)
        self._holders: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope.get("state", {}).get("caller", Caller())
        body: bytes = (await receive()).get("body", b"")  # the middleware has read all of it
        request = ReplicaRequest(_forwarded_scope(scope), body)
        try:
            if is_broadcast(scope["method"], scope["path"]):
                responses = await self._replicas.broadcast(request)
                await merge_responses(scope["path"], responses, self.metrics)(scope, receive, send)
                return
            release = self._admission.admit(caller, None)
            try:
                await self._forward(request, caller, send)
            finally:
                release()
        except APIError as refusal:
            await error_response(scope["path"], refusal)(scope, receive, send)

    async def _forward(self, request: ReplicaRequest, caller: Caller, send: Send) -> None:
        """Relays the response of one replica; tries others until a response has started.

        Raises:
            APIError: no replica responded.
        """
        path, headers = request.scope["path"], Headers(scope=request.scope)
        seconds = _seconds(headers, self._limits.request_seconds)
        end = time.monotonic() + seconds + LATE_SECONDS
        user = ""
        if request.body or path.startswith(STORED_PATH):
            user = user_of(path, headers, request.body, caller, self._limits.body_bytes)
        route = Route(user)
        if path == STEP_PATH:
            route = replace(route, holder=self._holders.get(user, ""))
            request = replace(request, holder=route.holder)
        stays = is_stored(path, request.body)
        for attempt in range(ATTEMPTS):
            response = RelayedResponse(send, route, attempt == ATTEMPTS - 1, stays)
            try:
                await self._relay(request, response, end - time.monotonic(), seconds)
            except Rejected:
                route = route.excluding(response.replica)
            except ReplicaLost:
                if response.started:
                    self.metrics.interrupted.inc()
                    await response.interrupt(path)
                    return
                await asyncio.sleep(PAUSE_SECONDS * attempt)
            else:
                if path == STEP_PATH and response.status == http.HTTPStatus.OK:
                    self._remember_holder(user, response.replica)
                return
            self.metrics.retries.inc()
        raise no_replica()

    async def _relay(
        self, request: ReplicaRequest, response: RelayedResponse, left: float, limit: float
    ) -> None:
        async with aclosing(self._replicas.send(request, response.route)) as parts:
            try:
                first = await asyncio.wait_for(parts.__anext__(), left)
            except asyncio.TimeoutError:
                raise APIError(
                    504, "deadline_exceeded", f"no replica answered in {limit:g} seconds"
                ) from None
            except StopAsyncIteration:
                raise ReplicaLost from None
            await response.relay(first)
            async for messages in parts:
                await response.relay(messages)
            if not response.complete:
                raise ReplicaLost

    def _remember_holder(self, user: str, replica: str) -> None:
        self._holders[user] = replica
        self._holders.move_to_end(user)
        while len(self._holders) > HOLDERS_MAX:
            self._holders.popitem(last=False)


def _seconds(headers: Headers, limit: float) -> float:
    """Seconds to the deadline of a request."""
    try:
        wanted = deadline_in(headers)
    except APIError:  # the replica rejects it, if it reads it
        wanted = None
    return min(wanted or limit, limit)


def no_replica() -> APIError:
    """The error if no replica is available, or all that were tried have died."""
    return APIError(503, "no_replica", "no replica takes requests now")


def _forwarded_scope(scope: Scope) -> dict[str, Any]:
    """The ASGI scope for a replica, without `Origin`, which the ingress has checked."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
    sent = {**{name: scope[name] for name in FORWARDED if name in scope}, "headers": headers}
    MutableHeaders(scope=sent)[REQUEST_ID_HEADER] = request_id.get() or ""
    return sent
