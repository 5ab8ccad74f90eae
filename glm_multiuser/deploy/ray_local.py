"""Serves with a local Ray instance that starts and stops with the command."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Optional

from glm_multiuser.deploy.ray_arguments import Scale
from glm_multiuser.device import cores
from glm_multiuser.errors import ConfigError, GLMMultiUserError
from glm_multiuser.server.logs import FIELDS, show_or_log_progress
from glm_multiuser.server.run import FLUSH_SECONDS, INTERRUPTED, url_of
from glm_multiuser.server.settings import ServerSettings

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

logger = logging.getLogger(__name__)

APPLICATION = "glm"
OBJECT_STORE_BYTES = 100 * 2**20
"""Ray's minimum is 75 MiB; responses are small and do not go through it."""
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""Logging of Ray Serve itself; replicas and ingress configure their own."""
POLL_SECONDS = 0.5
LOG_SECONDS = 5.0
"""Interval of progress lines in the log, without a terminal for a progress bar."""


def require_ray() -> None:
    """Checks that Ray Serve is installed.

    Raises:
        ConfigError: it is not, or this Python is too old for it.
    """
    if sys.version_info < (3, 10):
        raise ConfigError(
            "several replicas need Ray Serve, which needs Python 3.10 or newer; this is "
            f"{sys.version_info.major}.{sys.version_info.minor}"
        )
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"several replicas need {error.name}; install it with pip install 'glm-multiuser[ray]'"
        ) from error


def serve_replicas(settings: ServerSettings, replicas: int, listening: socket.socket) -> None:
    """Serves with several replicas on this machine until SIGTERM or SIGINT.

    Each replica gets an equal share of the CPU cores. SIGHUP starts a rolling update, for new
    weights in the same folder. A second SIGTERM or SIGINT exits without draining.

    Args:
        listening: reserves the address; closed here, because Ray binds it itself.

    Raises:
        GLMMultiUserError: a replica did not start.
    """
    url = url_of(listening)
    host, port = listening.getsockname()[:2]
    settings = settings.at(host)
    listening.close()
    count = cores()
    scale = Scale(replicas, cpus=count / replicas)
    # Ray installs a SIGTERM handler, so ours are installed after it.
    with local_ray(host, port, count), _signals() as received:
        for generation in itertools.count():
            fields = {"url": url, "replicas": replicas, "generation": generation}
            try:
                deploy(settings, scale, received.end)
            except GLMMultiUserError as error:
                if not generation:
                    raise
                # Replicas that were not replaced keep serving.
                logger.error("update failed", extra={FIELDS: {**fields, "error": str(error)}})
            else:
                if not received.end.is_set():
                    logger.info("ready", extra={FIELDS: fields})
            received.any.wait()
            if received.end.is_set():
                break
            received.any.clear()
        logger.info("draining")
        drain(settings.drain_seconds)
    logger.info("ended")


@contextmanager
def local_ray(host: str, port: int, cores: int) -> Iterator[None]:
    """Runs a local Ray with Serve's proxy at an address; drains it on exit."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Ray's default is 15, which starves replicas on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's proxy would decode the header as UTF-8, and answer 500 to names in Latin-1.
    os.environ.setdefault("RAY_SERVE_SESSION_ID_HEADER_KEY", "")
    # For Ray's own sockets; without it, Ray writes a token file to the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray import serve

    # A short path, because Ray puts sockets there; its last process may still write to it.
    with tempfile.TemporaryDirectory(prefix="glm-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=cores,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
            )
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port},
                logging_config=LOGGING,
            )
            yield
        finally:
            if ray.is_initialized():
                serve.shutdown()
            # Not `ray stop`, which also stops other users' Ray on this machine.
            ray.shutdown()


def deploy(settings: ServerSettings, scale: Scale, end: threading.Event) -> None:
    """Deploys, or performs a rolling update; returns when all replicas are ready.

    Args:
        end: returns early when it is set.

    Raises:
        GLMMultiUserError: a replica did not start.
    """
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    from glm_multiuser.deploy.ray_serve import application

    target = serve.RunTarget(application(settings, scale), APPLICATION, logging_config=LOGGING)
    serve.run_many([target], wait_for_applications_running=False)
    with show_or_log_progress(logger, "starting", LOG_SECONDS) as report:
        while not end.wait(POLL_SECONDS):
            status = serve.status().applications[APPLICATION]
            report(_running(status), scale.replicas, "replicas ready")
            if status.status == ApplicationStatus.RUNNING:
                return
            if status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise GLMMultiUserError(f"the replicas did not start: {_reason(status)}")


def drain(seconds: float) -> None:
    """Ends the application: new requests are rejected, running ones get `seconds`, then an error.

    `serve.shutdown` alone would stop the proxy first.
    """
    from ray import serve

    if not _running(serve.status().applications[APPLICATION]):
        return
    serve.delete(APPLICATION, _blocking=False)
    end = time.monotonic() + seconds + 2 * FLUSH_SECONDS
    while APPLICATION in serve.status().applications and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


def _running(status: ApplicationStatusOverview) -> int:
    from glm_multiuser.deploy.ray_serve import REPLICA

    deployment = status.deployments.get(REPLICA)
    return 0 if deployment is None else deployment.replica_states.get("RUNNING", 0)


def _reason(status: ApplicationStatusOverview) -> str:
    messages = [one.message for one in status.deployments.values() if one.message]
    # The lines above are the traceback.
    return str((messages or [status.message])[0]).strip().splitlines()[-1]


class _Received:
    """Received signals: `end` to stop, `any` to stop or update."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.any = threading.Event()


@contextmanager
def _signals() -> Iterator[_Received]:
    received = _Received()

    def handle(number: int, frame: Optional[FrameType]) -> None:
        if number != signal.SIGHUP:
            if received.end.is_set():
                # Ray's processes end with this one.
                sys.stderr.flush()
                os._exit(INTERRUPTED)
            received.end.set()
        received.any.set()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
