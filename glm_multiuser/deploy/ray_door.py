"""The door: who asks, which replica answers, and what happens when that one ends. Knows no Ray."""

from __future__ import annotations

import asyncio
import http
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from glm_multiuser.deploy.ray_answer import Answer, ReplicaLost, TurnedAway
from glm_multiuser.deploy.ray_everyone import DoorMetrics, answer_of_all, asks_everyone
from glm_multiuser.deploy.ray_replica import Answered, Asked
from glm_multiuser.deploy.ray_route import STEP_PATH, Route, user_of
from glm_multiuser.server.admission import Admission
from glm_multiuser.server.errors import NOT_READY_RETRY_SECONDS, Refusal, error_response
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.logs import request_id
from glm_multiuser.server.request_log import HEADER as REQUEST_ID_HEADER
from glm_multiuser.server.settings import Limits

ATTEMPTS = 3
"""Replicas that are asked, one after the other, as long as nothing has been handed out: not all of
them, because a request may be what kills them."""
PAUSE_SECONDS = 0.25
"""After a replica has been lost: others have to hear of it, too."""
HELD_MAX = 8192
"""Generations of the step API whose replica is known."""
SENT_ON = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")


class Replicas(Protocol):
    """What the door asks."""

    def ask(self, asked: Asked, route: Route) -> AsyncGenerator[list[Message], None]:
        """Messages of one replica's response.

        Raises:
            ReplicaLost: it died.
            Refusal: no replica can be asked.
        """

    async def ask_all(self, asked: Asked) -> Sequence[Answered]:
        """The responses of all replicas that are there.

        Raises:
            Refusal: there is none.
        """


class Door:
    """ASGI application that stands behind the guard, and holds no model.

    Args:
        replicas: that answer.
        limits: of one client, as for a server that is alone.
    """

    def __init__(self, replicas: Replicas, limits: Limits) -> None:
        self.metrics = DoorMetrics()
        self._replicas = replicas
        self._limits = limits
        self._admission = Admission(limits)
        self._holders: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope.get("state", {}).get("caller", Caller())
        body: bytes = (await receive()).get("body", b"")  # the guard has read all of it
        asked = Asked(_sent_on(scope), body)
        try:
            if asks_everyone(scope["method"], scope["path"]):
                answers = await self._replicas.ask_all(asked)
                await answer_of_all(scope["path"], answers, self.metrics)(scope, receive, send)
                return
            self._admission.enter(caller, None)
            try:
                await self._ask_one(asked, caller, send)
            finally:
                self._admission.leave(caller, None)
        except Refusal as refusal:
            await error_response(scope["path"], refusal)(scope, receive, send)

    async def _ask_one(self, asked: Asked, caller: Caller, send: Send) -> None:
        """Hands on the response of one replica; asks another while nothing has been handed on.

        Raises:
            Refusal: none answered.
        """
        path = asked.scope["path"]
        user = ""
        if asked.body:
            headers = Headers(scope=asked.scope)
            user = user_of(path, headers, asked.body, caller, self._limits.body_bytes)
        route = Route(user)
        if path == STEP_PATH:
            route = replace(route, holder=self._holders.get(user, ""))
            asked = replace(asked, holder=route.holder)
        for attempt in range(ATTEMPTS):
            answer = Answer(send, route, last=attempt == ATTEMPTS - 1)
            try:
                await self._hand_on(asked, answer)
            except TurnedAway:
                route = route.avoiding(answer.replica)
            except ReplicaLost:
                if answer.begun:
                    self.metrics.cut.inc()
                    await answer.cut(path)
                    return
                await asyncio.sleep(PAUSE_SECONDS * attempt)
            else:
                if path == STEP_PATH and answer.status == http.HTTPStatus.OK:
                    self._remember(user, answer.replica)
                return
            self.metrics.sent_again.inc()
        raise no_replica()

    async def _hand_on(self, asked: Asked, answer: Answer) -> None:
        async with aclosing(self._replicas.ask(asked, answer.route)) as parts:
            try:
                first = await asyncio.wait_for(parts.__anext__(), self._limits.request_seconds)
            except asyncio.TimeoutError:
                limit = self._limits.request_seconds
                raise Refusal(
                    504, "deadline_exceeded", f"no replica answered in {limit:g} seconds"
                ) from None
            except StopAsyncIteration:
                raise ReplicaLost from None
            await answer.hear(first)
            async for messages in parts:
                await answer.hear(messages)
            if not answer.complete:
                raise ReplicaLost

    def _remember(self, user: str, replica: str) -> None:
        self._holders[user] = replica
        self._holders.move_to_end(user)
        while len(self._holders) > HELD_MAX:
            self._holders.popitem(last=False)


def no_replica() -> Refusal:
    """What is said while none is there, or each one that was asked has died."""
    return Refusal(
        503, "no_replica", "no replica takes requests now", retry_after=NOT_READY_RETRY_SECONDS
    )


def _sent_on(scope: Scope) -> dict[str, Any]:
    """What a replica has to know; whether the page's origin may ask has been settled here."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"origin"]
    sent = {**{name: scope[name] for name in SENT_ON if name in scope}, "headers": headers}
    MutableHeaders(scope=sent)[REQUEST_ID_HEADER] = request_id.get() or ""
    return sent
