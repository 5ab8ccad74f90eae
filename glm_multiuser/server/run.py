"""The life cycle of a server: listen, load, serve, drain, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable

import uvicorn

from glm_multiuser.errors import ConfigError
from glm_multiuser.server.app import create_app
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.http_protocol import HTTPProtocol
from glm_multiuser.server.loading import OpenLLM, open_llm
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
"""Maximum number of connections waiting to be accepted."""
FLUSH_SECONDS = 5
"""For responses that are still being sent at shutdown."""
POLL_SECONDS = 0.05
INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; port 0 selects a free port.

    Raises:
        ConfigError: no such address, or the port is in use.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            # Only `listen` fails when another process has bound the port but does not listen yet.
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on host {host!r}, port {port}: {error}") from error
    return listening


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def serve(
    settings: ServerSettings,
    listening: socket.socket,
    announce: Callable[[], None],
    open_llm: OpenLLM = open_llm,
) -> None:
    """Serves until SIGTERM or SIGINT; a second SIGINT ends the process immediately.

    Args:
        settings, listening, open_llm: as in `ServerLifecycle`.
        announce: called once signals shut the server down gracefully.

    Raises:
        GLMMultiUserError: a model could not be loaded at startup.
    """
    server = ServerLifecycle(settings, listening, open_llm)
    with _signals(server):
        announce()
        await server.run()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `_signals`: running requests are drained before uvicorn stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(server: ServerLifecycle) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if server.stop_requested.is_set() and number == signal.SIGINT:
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        logger.info("shutdown requested", extra={FIELDS: {"signal": number.name}})
        server.request_stop()

    wanted = (signal.SIGTERM, signal.SIGINT)
    for number in wanted:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)


class ServerLifecycle:
    """A server from its first connection to its shutdown. Created in a running event loop.

    Args:
        settings: models, limits, etc.
        listening: the socket that clients connect to.
        open_llm: opens a model; replaced in tests.

    Attributes:
        url: base URL.
    """

    def __init__(
        self, settings: ServerSettings, listening: socket.socket, open_llm: OpenLLM
    ) -> None:
        self.settings = settings.at(listening.getsockname()[0])
        self.listening = listening
        self.service = Service(self.settings, open_llm)
        self.stop_requested = asyncio.Event()
        # uvicorn expects a class, but only calls it.
        protocol: Any = partial(
            HTTPProtocol,
            on_response=self.service.record_response,
            body_bytes=self.settings.limits.body_bytes,
        )
        config = uvicorn.Config(
            create_app(self.service),
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            proxy_headers=bool(settings.forwarded_allow_ips),
            forwarded_allow_ips=settings.forwarded_allow_ips,
        )
        self.url = url_of(listening, settings.scheme)
        self._uvicorn = _Uvicorn(config)

    def request_stop(self) -> None:
        """Starts the graceful shutdown. May be called at any time."""
        self.service.models.stop_loading()
        self.stop_requested.set()

    async def run(self) -> None:
        """Serves until `request_stop` is called.

        Raises:
            GLMMultiUserError: a model could not be loaded at startup.
        """
        serving = asyncio.ensure_future(self._uvicorn.serve([self.listening]))
        maintenance = asyncio.ensure_future(maintenance_loop(self.service))
        try:
            await self._load()
            if not self.stop_requested.is_set():
                self.service.state = "ready"
                logger.info("ready", extra={FIELDS: {"url": self.url}})
            await self.stop_requested.wait()
            await self._drain()
        finally:
            self._uvicorn.should_exit = True
            await serving
            self.listening.close()  # uvicorn leaves it open if it has to exit while it starts
            maintenance.cancel()
            await asyncio.gather(maintenance, return_exceptions=True)
            await self.service.close()
            logger.info("ended")

    async def _load(self) -> None:
        for model in self.settings.models:
            if not model.load:
                continue
            try:
                await self.service.models.load(model.name)
            except Exception:
                # A shutdown request cancels the load.
                if not self.stop_requested.is_set():
                    raise
                return

    async def _drain(self) -> None:
        """Gives running requests `drain_seconds` to finish; aborts the rest with 503."""
        service = self.service
        service.state = "draining"
        logger.info("draining", extra={FIELDS: {"running": service.running}})
        loop = asyncio.get_running_loop()
        end = loop.time() + self.settings.drain_seconds
        # Including requests whose prompt is being tokenized, or whose grammar is not compiled yet.
        while service.admission.in_flight and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        # Not awaited: nobody may be polling a generation of the step API.
        service.abort_all(APIError(503, "shutting_down", "the server ended before this request"))


async def maintenance_loop(service: Service) -> None:
    """Samples the token rate and restarts failed engines every second, until cancelled."""
    restarting: set[asyncio.Future[None]] = set()
    while True:
        service.tick()
        if not restarting:
            task = asyncio.ensure_future(service.models.restart_failed())
            restarting.add(task)
            task.add_done_callback(restarting.discard)
        await asyncio.sleep(1.0)
