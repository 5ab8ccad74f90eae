"""Relays the response of a replica to the client, also if the replica dies."""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Message, Send

from glm_multiuser.deploy.ray_replica import REPLICA_HEADER
from glm_multiuser.deploy.ray_route import Route
from glm_multiuser.server.errors import APIError, error_body
from glm_multiuser.server.events import NAMED_EVENTS, event

logger = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica died."""


class Rejected(Exception):
    """The replica rejected the request; another one may accept it."""


class RelayedResponse:
    """A response relayed to the client; its head is held back until the body starts.

    Args:
        send: to the client.
        route: of the request.
        last: whether this is the last attempt, which relays a rejection.
        stays: whether no other replica is tried because this one is full.
    """

    def __init__(self, send: Send, route: Route, last: bool, stays: bool) -> None:
        self.route = route
        self.started = self.complete = False
        self._send = send
        self._last = last
        self._stays = stays
        self._head: Message = {}

    @property
    def replica(self) -> str:
        return Headers(raw=self._head.get("headers", [])).get(REPLICA_HEADER, "")

    @property
    def status(self) -> int:
        return int(self._head.get("status", 0))

    async def relay(self, messages: Sequence[Message]) -> None:
        """Forwards messages to the client.

        Raises:
            Rejected: another replica should be tried; nothing was sent.
        """
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.started:
                if self._is_rejection(message):
                    raise Rejected
                self.started = True
                await self._send(self._head)
            await self._send(message)
            self.complete = not message.get("more_body", False)

    async def interrupt(self, path: str) -> None:
        """Ends the stream of a dead replica with an error event.

        Raises:
            ReplicaLost: not an event stream; the connection must be closed.
        """
        if self.complete:
            return
        kind = Headers(raw=self._head["headers"]).get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ReplicaLost
        logger.warning("stream interrupted: its replica died")
        message = "the replica of this response has ended; retry the request"
        error = APIError(502, "replica_ended", message)
        body = error_body(path, error)
        if path == "/":
            body["status"] = error.status
        name = "error" if path.startswith(NAMED_EVENTS) else None
        await self._send({"type": "http.response.body", "body": event(body, name)})

    def _is_rejection(self, first: Message) -> bool:
        """Whether the replica is full or unavailable, and another one should be tried.

        False if the session has too many concurrent requests: they run on this replica.
        """
        if self._last or self.route.holder or self.replica in self.route.excluded:
            return False
        if self.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            return True
        full = self.status == http.HTTPStatus.TOO_MANY_REQUESTS and not self._stays
        return full and _code_of(first.get("body", b"")) == "queue_full"


def _code_of(body: bytes) -> object:
    """The code of an error in OpenAI's or KServe's format."""
    content = json.loads(body)
    error = content.get("error")
    return error.get("code") if isinstance(error, dict) else content.get("code")
