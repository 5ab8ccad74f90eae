"""Runs a Triton server with our repository and a supervisor per model."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable

from glm_multiuser.deploy.triton_client import CONNECTION_ERRORS, TritonClient
from glm_multiuser.deploy.triton_repository import MODELS, write_repository
from glm_multiuser.deploy.triton_server import Ports, TritonServer, make_backends
from glm_multiuser.deploy.triton_supervisor import RETRY_SECONDS, Supervisor
from glm_multiuser.errors import ConfigError, EngineClosedError
from glm_multiuser.progress import show_progress
from glm_multiuser.server.logs import FIELDS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RESPONSE_SECONDS = 60.0
"""A server that does not respond for longer is lost: one that aborts may hang in its abort."""


def serve(parameters: Mapping[str, object], host: str, ports: Ports) -> None:
    """Serves the models until SIGTERM, SIGHUP or Ctrl-C, with a supervisor for each.

    A server that dies, or no longer responds, after it was ready is started again, on the same
    ports, until that succeeds.

    Args:
        parameters: of every model, as in its `config.pbtxt`.
        host, ports: to listen on.

    Raises:
        ConfigError: no wheel, no repository, or a model that cannot be loaded.
        EngineClosedError: the server died, or did not respond, before it was ready.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
            signal.signal(number, lambda number, frame: stop.set())
    with tempfile.TemporaryDirectory(prefix="glm_multiuser_") as scratch:
        repository, backends = Path(scratch) / "model_repository", Path(scratch) / "backends"
        write_repository(repository, parameters)
        make_backends(backends)
        _serve_once(repository, backends, host, ports, stop)
        while not stop.is_set():
            try:
                _serve_once(repository, backends, host, ports, stop)
            except (ConfigError, EngineClosedError, OSError) as error:
                logger.error("recovery failed", extra={FIELDS: {"error": str(error)}})
                stop.wait(RETRY_SECONDS)


def _serve_once(
    repository: Path, backends: Path, host: str, ports: Ports, stop: threading.Event
) -> None:
    """Serves until `stop` is set, or the server is lost after it was ready."""
    server = TritonServer(repository, backends, host, ports)
    over = threading.Event()
    try:
        client = TritonClient(host, ports.http)
        if not _load_models(server, client, stop):
            return
        logger.info("ready", extra={FIELDS: {"models": MODELS, **vars(ports)}})
        for model in MODELS:
            supervisor = Supervisor(client, server, model, repository / model / "config.pbtxt")
            threading.Thread(target=supervisor.watch, args=(over,), daemon=True).start()
        try:
            _wait(lambda: False, server, client, stop)
        except EngineClosedError as error:
            fields = {"code": server.exit_code(), "why": str(error)}
            logger.error("tritonserver lost", extra={FIELDS: fields})
        else:
            logger.info("ending")
    finally:
        over.set()
        server.stop()


def _load_models(server: TritonServer, client: TritonClient, stop: threading.Event) -> bool:
    """Loads all models; returns whether it did before `stop` was set."""
    if not _wait(client.is_live, server, client, stop):
        return False
    with ThreadPoolExecutor(len(MODELS)) as threads, show_progress(None) as progress:
        loads: list[Future[None]] = [threads.submit(client.load, model) for model in MODELS]

        def all_done() -> bool:
            done = sum(load.done() for load in loads)
            progress(done, len(MODELS), f"loading {', '.join(MODELS)}")
            return done == len(MODELS)

        try:
            loaded = _wait(all_done, server, client, stop)
        finally:
            if not all_done():
                # Else the executor waits: a dead server's stubs keep its connections open.
                server.stop()
        try:
            for load in loads if loaded else ():
                load.result()
        except CONNECTION_ERRORS as error:
            raise EngineClosedError(f"tritonserver was lost while it loaded: {error}") from error
    return loaded


def _wait(
    done: Callable[[], bool], server: TritonServer, client: TritonClient, stop: threading.Event
) -> bool:
    """Waits until `done` returns true; returns False if `stop` is set before.

    Raises:
        EngineClosedError: the server died, or did not respond for `RESPONSE_SECONDS`.
    """
    responded = time.monotonic()
    while True:
        if server.exit_code() is not None:
            raise EngineClosedError(
                f"tritonserver ended by itself with code {server.exit_code()}; its log says why"
            )
        if done():
            return True
        if stop.wait(POLL_SECONDS):
            return False
        if client.is_live():
            responded = time.monotonic()
        elif time.monotonic() - responded > RESPONSE_SECONDS:
            raise EngineClosedError(
                f"tritonserver did not respond for {RESPONSE_SECONDS:g} seconds"
            )
