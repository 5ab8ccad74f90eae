"""One replica: the whole server of one device, without its socket."""

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
from glm_multiuser.server.errors import Refusal, error_response
from glm_multiuser.server.loading import OpenLLM, open_llm
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.run import keep_house
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings

logger = logging.getLogger(__name__)

REPLICA_HEADER = "x-replica"
"""Of a response: which replica gave it."""


@dataclass(frozen=True)
class Asked:
    """A request as it travels from the door to a replica.

    Attributes:
        scope: of ASGI, with what can travel.
        body: the whole of it.
        holder: the only replica that may answer; empty: any.
    """

    scope: dict[str, Any]
    body: bytes
    holder: str = ""


@dataclass(frozen=True)
class Answered:
    """A whole response of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replica:
    """Answers what the door hands in. Lives on an event loop.

    Args:
        name: by which the door knows it.
        settings: as of a server of its own.
        open_llm: opens a model; tests put another in its place.
    """

    def __init__(self, name: str, settings: ServerSettings, open_llm: OpenLLM = open_llm) -> None:
        self.name = name
        self.service = Service(settings, open_llm)
        self._app = create_app(self.service)
        self._housekeeping: Optional[asyncio.Future[None]] = None

    async def start(self) -> None:
        """Loads the models.

        Raises:
            GLMMultiUserError: one cannot be loaded.
        """
        for model in self.service.settings.models:
            if model.load:
                await self.service.models.load(model.name)
        self._housekeeping = asyncio.ensure_future(keep_house(self.service))
        self.service.state = "ready"
        logger.info("replica ready", extra={FIELDS: {"replica": self.name, "pid": os.getpid()}})

    async def close(self) -> None:
        """Ends what still runs, and gives the device back."""
        self.service.state = "draining"
        self.service.abort_all(Refusal(503, "shutting_down", "the replica ended"))
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        await self.service.models.close()

    def check_health(self) -> None:
        """Ray starts a replica again that raises here.

        Raises:
            GLMMultiUserError: a model is gone for good; only a new process can help.
        """
        if not self.service.live:
            raise GLMMultiUserError("a model failed and could not be started again")

    async def answer(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        """The messages of the response, as many at a time as there are.

        Closing or cancelling it is for the server what a client is that goes away.
        """
        messages: asyncio.Queue[Optional[Message]] = asyncio.Queue()
        gone = asyncio.Event()
        running = asyncio.ensure_future(self._run(asked, messages, gone))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                ended = ready[-1] is None
                there = [message for message in ready if message is not None]
                if there:
                    yield there
            running.result()
        finally:
            gone.set()
            await asyncio.gather(running, return_exceptions=True)

    async def answer_whole(self, asked: Asked) -> Answered:
        """The response when it is complete."""
        messages = [message async for some in self.answer(asked) for message in some]
        start, *parts = messages
        body = b"".join(part.get("body", b"") for part in parts)
        return Answered(self.name, start["status"], list(start["headers"]), body)

    async def _run(
        self, asked: Asked, messages: asyncio.Queue[Optional[Message]], gone: asyncio.Event
    ) -> None:
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self.name
            await messages.put(message)

        app = self._app
        if asked.holder not in ("", self.name):
            # Here it would begin anew, and its reader has read a part of it already.
            lost = f"replica {asked.holder!r}, which held this generation, has ended"
            app = error_response(asked.scope["path"], Refusal(410, "replica_ended", lost))
        await app(dict(asked.scope), receive, send)
