"""A replica: the server application of one device, without a socket."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Optional

from starlette.datastructures import MutableHeaders
from starlette.types import Message

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.app import create_app
from glm_multiuser.server.errors import APIError, error_response
from glm_multiuser.server.loading import OpenLLM, open_llm
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.run import maintenance_loop
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings

logger = logging.getLogger(__name__)

REPLICA_HEADER = "x-replica"
"""Response header: the name of the replica."""
NO_ANSWER = 504
"""Status of `no_answer`."""


@dataclass(frozen=True)
class ReplicaRequest:
    """A request from the ingress to a replica.

    Attributes:
        scope: the picklable part of the ASGI scope.
        body: the complete body.
        holder: the only replica that can handle it; empty: any.
    """

    scope: dict[str, Any]
    body: bytes
    holder: str = ""


@dataclass(frozen=True)
class ReplicaResponse:
    """A complete response of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def no_answer(replica: str, path: str, seconds: float) -> ReplicaResponse:
    """The substitute for the response of a replica that hangs."""
    message = f"replica {replica!r} did not answer in {seconds:g} seconds"
    error = error_response(path, APIError(NO_ANSWER, "deadline_exceeded", message))
    return ReplicaResponse(replica, NO_ANSWER, error.raw_headers, bytes(error.body))


class Replica:
    """Handles requests from the ingress on one event loop.

    Args:
        name: of the replica.
        settings: as for a single server.
        open_llm: opens a model; tests replace it.
    """

    def __init__(self, name: str, settings: ServerSettings, open_llm: OpenLLM = open_llm) -> None:
        self.name = name
        self.service = Service(settings, open_llm)
        self._app = create_app(self.service)
        self._maintenance: Optional[asyncio.Future[None]] = None

    async def start(self) -> None:
        """Loads the models.

        Raises:
            GLMMultiUserError: a model cannot be loaded.
        """
        for model in self.service.settings.models:
            if model.load:
                await self.service.models.load(model.name)
        self._maintenance = asyncio.ensure_future(maintenance_loop(self.service))
        self.service.state = "ready"
        logger.info("replica ready", extra={FIELDS: {"replica": self.name, "pid": os.getpid()}})

    async def close(self) -> None:
        """Cancels running requests and closes the models."""
        self.service.state = "draining"
        self.service.abort_all(APIError(503, "shutting_down", "the replica ended"))
        if self._maintenance is not None:
            self._maintenance.cancel()
        await self.service.close()

    def check_health(self) -> None:
        """Called by Ray, which restarts the replica if this raises.

        Raises:
            GLMMultiUserError: a model failed and cannot be restarted in this process.
        """
        if not self.service.live:
            raise GLMMultiUserError("a model failed and could not be started again")

    async def stream(self, request: ReplicaRequest) -> AsyncGenerator[list[Message], None]:
        """Yields the ASGI messages of the response, in batches of the available ones.

        Closing or cancelling the generator acts as a client disconnect.
        """
        messages: asyncio.Queue[Optional[Message]] = asyncio.Queue()
        disconnected = asyncio.Event()
        running = asyncio.ensure_future(self._run(request, messages, disconnected))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                ended = ready[-1] is None
                batch = [message for message in ready if message is not None]
                if batch:
                    yield batch
            running.result()
        finally:
            disconnected.set()
            await asyncio.gather(running, return_exceptions=True)

    async def call(self, request: ReplicaRequest) -> ReplicaResponse:
        """Returns the complete response."""
        messages = [message async for some in self.stream(request) for message in some]
        start, *parts = messages
        body = b"".join(part.get("body", b"") for part in parts)
        return ReplicaResponse(self.name, start["status"], list(start["headers"]), body)

    async def _run(
        self,
        request: ReplicaRequest,
        messages: asyncio.Queue[Optional[Message]],
        disconnected: asyncio.Event,
    ) -> None:
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self.name
            await messages.put(message)

        app = self._app
        if request.holder not in ("", self.name):
            # It would start from the beginning, but the client has already read a part.
            lost = f"replica {request.holder!r}, which held this generation, has ended"
            app = error_response(request.scope["path"], APIError(410, "replica_ended", lost))
        await app(dict(request.scope), receive, send)
