"""A response on its way from a replica to the client, and what becomes of it when that one ends."""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import Message, Send

from glm_multiuser.deploy.ray_replica import REPLICA_HEADER
from glm_multiuser.deploy.ray_route import Route
from glm_multiuser.server.errors import Refusal, error_body
from glm_multiuser.server.events import event

logger = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica that was asked has died."""


class TurnedAway(Exception):
    """A replica takes no more requests; another one may."""


class Answer:
    """A response on its way through the door. Its head waits for the first part of the body.

    Args:
        send: to the client.
        route: by which it was asked for.
        last: whether it is handed on even if it turns the request away.
    """

    def __init__(self, send: Send, route: Route, last: bool) -> None:
        self.route = route
        self.begun = self.complete = False
        self._send = send
        self._last = last
        self._head: Message = {}

    @property
    def replica(self) -> str:
        return Headers(raw=self._head.get("headers", [])).get(REPLICA_HEADER, "")

    @property
    def status(self) -> int:
        return int(self._head.get("status", 0))

    async def hear(self, messages: Sequence[Message]) -> None:
        """Hands messages on.

        Raises:
            TurnedAway: instead of handing on the first ones.
        """
        for message in messages:
            if message["type"] == "http.response.start":
                self._head = message
                continue
            if not self.begun:
                if self._turns_away(message):
                    raise TurnedAway
                self.begun = True
                await self._send(self._head)
            await self._send(message)
            self.complete = not message.get("more_body", False)

    async def cut(self, path: str) -> None:
        """Says to the reader of a stream that there will be no more.

        Raises:
            ReplicaLost: it is no stream; the connection has to end.
        """
        if self.complete:
            return
        kind = Headers(raw=self._head["headers"]).get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ReplicaLost
        logger.warning("a stream was cut: its replica ended")
        message = "the replica that gave this answer has ended; ask again"
        refusal = Refusal(502, "replica_ended", message)
        body = error_body(path, refusal)
        if path == "/":
            body["status"] = refusal.status
        await self._send({"type": "http.response.body", "body": event(body)})

    def _turns_away(self, first: Message) -> bool:
        """Whether another replica may take what this one does not.

        A session that has too many requests running has them here, so that one is not among them.
        """
        if self._last or self.route.holder or self.replica in self.route.without:
            return False
        if self.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            return True
        full = self.status == http.HTTPStatus.TOO_MANY_REQUESTS
        return full and _code_of(first.get("body", b"")) == "queue_full"


def _code_of(body: bytes) -> object:
    """Of an error, in whichever shape."""
    said = json.loads(body)
    error = said.get("error")
    return error.get("code") if isinstance(error, dict) else said.get("code")
