"""Reloads a model of a Triton server when its process has died or no longer responds.

Triton does not: a killed stub is not restarted, and its model stays "ready".
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from glm_multiuser.deploy.triton_client import CONNECTION_ERRORS, TritonClient
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.logs import FIELDS

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
PROBE_SECONDS = 3.0
PROBE_TIMEOUT_SECONDS = 60.0
"""A model that takes longer to respond is stuck."""
UNLOAD_SECONDS = 1.0
"""Wait for the dead version to unload; with unfinished requests it never does: harmless."""
RETRY_SECONDS = 5.0


class Stubs(Protocol):
    """Finds the processes of models."""

    def stub(self, model: str) -> object:
        """None if this model has no process."""


class Supervisor:
    """Watches one model: its process must exist, and it must generate a token.

    Models that are unloaded or loading are left alone.

    Args:
        client: of the server.
        stubs: finds the model's process.
        model: its name.
        config: its `config.pbtxt`, touched because Triton reloads only what has changed.
    """

    def __init__(self, client: TritonClient, stubs: Stubs, model: str, config: Path) -> None:
        self._client = client
        self._stubs = stubs
        self._model = model
        self._config = config
        self._recovering = threading.Lock()
        self._recoveries = 0

    def watch(self, stop: threading.Event) -> None:
        """Watches the model until `stop` is set."""
        probing = threading.Thread(target=self._probe, args=(stop,), daemon=True)
        probing.start()
        while not stop.wait(CHECK_SECONDS):
            if self._has_died():
                self._recover("its process has died", self._recoveries, stop)

    def _has_died(self) -> bool:
        # Checked twice, because it may have been loaded in between.
        return (
            self._stubs.stub(self._model) is None
            and self._is_ready()
            and self._stubs.stub(self._model) is None
        )

    def _is_ready(self) -> bool:
        try:
            return self._client.state(self._model) == "READY"
        except CONNECTION_ERRORS:
            return False

    def _probe(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_SECONDS):
            recoveries = self._recoveries
            if not self._is_ready():
                continue
            problem = "it responds with an error"
            try:
                if self._client.answers(self._model, PROBE_TIMEOUT_SECONDS):
                    continue
            except CONNECTION_ERRORS as error:
                problem = f"it does not respond: {error}"
            if self._is_ready():
                self._recover(problem, recoveries, stop)

    def _recover(self, problem: str, recoveries: int, stop: threading.Event) -> None:
        """Reloads the model until that succeeds or `stop` is set.

        Args:
            recoveries: their count when the problem was found; a later one may have solved it.
        """
        with self._recovering:
            if self._recoveries != recoveries or stop.is_set():
                return
            start = time.monotonic()
            logger.warning("model lost", extra={FIELDS: {"model": self._model, "why": problem}})
            while not self._reloaded():
                if stop.wait(RETRY_SECONDS):
                    return
            self._recoveries += 1
        seconds = round(time.monotonic() - start, 1)
        logger.info("model recovered", extra={FIELDS: {"model": self._model, "seconds": seconds}})

    def _reloaded(self) -> bool:
        try:
            self._client.unload(self._model)
            deadline = time.monotonic() + UNLOAD_SECONDS
            while self._client.state(self._model) == "UNLOADING" and time.monotonic() < deadline:
                time.sleep(UNLOAD_SECONDS / 10)
            self._config.touch()
            self._client.load(self._model)
        except (ConfigError, *CONNECTION_ERRORS) as error:
            fields = {"model": self._model, "error": str(error)}
            logger.error("recovery failed", extra={FIELDS: fields})
            return False
        return True
