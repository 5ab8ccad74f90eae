"""The life of a server: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.app import create_app
from glm_multiuser.server.connections import Connection
from glm_multiuser.server.errors import Refusal
from glm_multiuser.server.loading import OpenLLM, open_llm
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
"""Connections that may wait to be accepted."""
FLUSH_SECONDS = 5
"""For what has ended but is still being sent, when the server ends."""
POLL_SECONDS = 0.05
INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can reach from now on; port 0 takes a free one.

    Raises:
        ConfigError: no such address, or somebody has this port.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            # Only this tells that somebody else has the port but does not listen yet.
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}") from error
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    settings: ServerSettings, listening: socket.socket, open_llm: OpenLLM = open_llm
) -> None:
    """Serves until SIGTERM or SIGINT; a second SIGINT ends the process at once.

    Raises:
        GLMMultiUserError: a model could not be loaded at the start.
    """
    life = Life(settings, listening, open_llm)
    with _signals(life):
        await life.run()


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to us: running requests end before uvicorn does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(life: Life) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        if life.asked_to_end.is_set() and number == signal.SIGINT:
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        logger.info("asked to end", extra={FIELDS: {"signal": number.name}})
        life.end()

    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


class Life:
    """One server from its first connection to its end. Made where an event loop runs.

    Args:
        settings: models, limits and the like.
        listening: where clients come.
        open_llm: opens a model; tests put another in its place.
    """

    def __init__(
        self, settings: ServerSettings, listening: socket.socket, open_llm: OpenLLM = open_llm
    ) -> None:
        self.settings = settings
        self.listening = listening
        self.service = Service(settings, open_llm)
        self.asked_to_end = asyncio.Event()
        config = uvicorn.Config(
            create_app(self.service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        self._uvicorn = _Uvicorn(config)

    def end(self) -> None:
        """Asks the server to drain and end. May be called at any moment."""
        self.service.models.end()
        self.asked_to_end.set()

    async def run(self) -> None:
        """Serves until `end` is called.

        Raises:
            GLMMultiUserError: a model could not be loaded at the start.
        """
        serving = asyncio.ensure_future(self._uvicorn.serve([self.listening]))
        housekeeping = asyncio.ensure_future(keep_house(self.service))
        try:
            await self._load()
            if not self.asked_to_end.is_set():
                self.service.state = "ready"
                logger.info("ready", extra={FIELDS: {"url": url_of(self.listening)}})
            await self.asked_to_end.wait()
            await self._drain()
        finally:
            self._uvicorn.should_exit = True
            await serving
            housekeeping.cancel()
            await asyncio.gather(housekeeping, return_exceptions=True)
            await self.service.models.close()
            logger.info("ended")

    async def _load(self) -> None:
        for model in self.settings.models:
            if not model.load:
                continue
            try:
                await self.service.models.load(model.name)
            except Exception:
                # Whoever asked the server to end made the load give up.
                if not self.asked_to_end.is_set():
                    raise
                return

    async def _drain(self) -> None:
        """Running requests get their time; the rest ends with an error of its own."""
        service = self.service
        service.state = "draining"
        logger.info("draining", extra={FIELDS: {"running": service.running}})
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.drain_seconds
        while service.running and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        # Nobody waits for them here: of the step API's, there may be no reader at the moment.
        service.abort_all(Refusal(503, "shutting_down", "the server ended before this request"))


async def keep_house(service: Service) -> None:
    """Once a second: the speed, and engines that failed. Never returns by itself."""
    restarting: set[asyncio.Future[None]] = set()
    while True:
        service.hear_second()
        if not restarting:
            task = asyncio.ensure_future(service.models.restart_failed())
            restarting.add(task)
            task.add_done_callback(restarting.discard)
        await asyncio.sleep(1.0)
