"""Runs a Triton server with our repository and a supervisor per model."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from glm_multiuser.deploy.triton_client import TritonClient
from glm_multiuser.deploy.triton_repository import MODELS, write_repository
from glm_multiuser.deploy.triton_server import Ports, TritonServer, make_backends
from glm_multiuser.deploy.triton_supervisor import CONNECTION_ERRORS, RETRY_SECONDS, Supervisor
from glm_multiuser.errors import ConfigError, EngineClosedError
from glm_multiuser.progress import show_progress
from glm_multiuser.server.logs import FIELDS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


def serve(parameters: Mapping[str, object], host: str, ports: Ports) -> None:
    """Serves the models until SIGTERM, SIGHUP or Ctrl-C, with a supervisor for each.

    A server that dies after it was ready is started again, on the same ports, until that succeeds.

    Args:
        parameters: of every model, as in its `config.pbtxt`.
        host, ports: to listen on.

    Raises:
        ConfigError: no wheel, no repository, or a model that cannot be loaded.
        EngineClosedError: the server died before it was ready.
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
            except (ConfigError, EngineClosedError, *CONNECTION_ERRORS) as error:
                logger.error("recovery failed", extra={FIELDS: {"error": str(error)}})
                stop.wait(RETRY_SECONDS)


def _serve_once(
    repository: Path, backends: Path, host: str, ports: Ports, stop: threading.Event
) -> None:
    """Serves until `stop` is set, or the server dies after it was ready."""
    server = TritonServer(repository, backends, host, ports)
    over = threading.Event()
    try:
        client = TritonClient(host, ports.http)
        _load_models(server, client, stop)
        if stop.is_set():
            return
        logger.info("ready", extra={FIELDS: {"models": MODELS, **vars(ports)}})
        for model in MODELS:
            supervisor = Supervisor(client, server, model, repository / model / "config.pbtxt")
            threading.Thread(target=supervisor.watch, args=(over,), daemon=True).start()
        while not stop.wait(POLL_SECONDS):
            if server.exit_code() is not None:
                logger.error("tritonserver lost", extra={FIELDS: {"code": server.exit_code()}})
                return
        logger.info("ending")
    finally:
        over.set()
        server.stop()


def _load_models(server: TritonServer, client: TritonClient, stop: threading.Event) -> None:
    """Loads all models, or returns when `stop` is set."""
    while not client.is_live():
        if _stopped(server, stop):
            return
    with ThreadPoolExecutor(len(MODELS)) as threads, show_progress(None) as progress:
        loads: list[Future[None]] = [threads.submit(client.load, model) for model in MODELS]
        while not all(load.done() for load in loads):
            done = sum(load.done() for load in loads)
            progress(done, len(MODELS), f"loading {', '.join(MODELS)}")
            if _stopped(server, stop):
                server.stop()  # ends a running load
                return
        for load in loads:
            load.result()


def _stopped(server: TritonServer, stop: threading.Event) -> bool:
    """Waits `POLL_SECONDS`; returns whether a signal arrived.

    Raises:
        EngineClosedError: the server died.
    """
    if stop.wait(POLL_SECONDS):
        return True
    if server.exit_code() is not None:
        raise EngineClosedError(
            f"tritonserver ended by itself with code {server.exit_code()}; its log says why"
        )
    return False
