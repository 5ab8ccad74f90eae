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
from glm_multiuser.deploy.triton_server import Ports, TritonServer
from glm_multiuser.deploy.triton_supervisor import Supervisor
from glm_multiuser.errors import EngineClosedError
from glm_multiuser.progress import show_progress
from glm_multiuser.server.logs import FIELDS

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2


def serve(parameters: Mapping[str, object], host: str, ports: Ports) -> None:
    """Starts the server, loads the models and supervises them until SIGTERM or Ctrl-C.

    Args:
        parameters: of every model, as in its `config.pbtxt`.
        host, ports: to listen on.

    Raises:
        ConfigError: no wheel, no repository, or a model that cannot be loaded.
        EngineClosedError: the server ended by itself.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    with tempfile.TemporaryDirectory(prefix="glm_multiuser_") as scratch:
        repository = Path(scratch) / "model_repository"
        write_repository(repository, parameters)
        server = TritonServer(repository, Path(scratch), host, ports)
        try:
            _run(server, repository, stop)
        finally:
            stop.set()
            server.stop()


def _run(server: TritonServer, repository: Path, stop: threading.Event) -> None:
    client = TritonClient(server.host, server.ports.http)
    while not client.is_live():
        if _ended(server, stop):
            return
    with ThreadPoolExecutor(len(MODELS)) as threads, show_progress(None) as progress:
        loads: list[Future[None]] = [threads.submit(client.load, model) for model in MODELS]
        while not all(load.done() for load in loads):
            done = sum(load.done() for load in loads)
            progress(done, len(MODELS), f"loading {', '.join(MODELS)}")
            if _ended(server, stop):
                server.stop()  # ends a running load
                return
        for load in loads:
            load.result()
    logger.info("ready", extra={FIELDS: {"models": MODELS, **vars(server.ports)}})
    for model in MODELS:
        supervisor = Supervisor(client, server, model, repository / model / "config.pbtxt")
        threading.Thread(target=supervisor.watch, args=(stop,), daemon=True).start()
    while not _ended(server, stop):
        pass
    logger.info("ending")


def _ended(server: TritonServer, stop: threading.Event) -> bool:
    """Waits `POLL_SECONDS`; returns whether a signal arrived.

    Raises:
        EngineClosedError: the server ended by itself.
    """
    if stop.wait(POLL_SECONDS):
        return True
    if server.exit_code() is not None:
        raise EngineClosedError(
            f"tritonserver ended by itself with code {server.exit_code()}; its log says why"
        )
    return False
