"""Brings a model of a Triton server back when its process has died, or no longer answers.

Triton does neither: a killed stub is not started again, and its model stays "ready".
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from glm_multiuser.deploy.triton_door import Door
from glm_multiuser.errors import ConfigError
from glm_multiuser.server.logs import FIELDS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
PROBE_SECONDS = 3.0
PATIENCE_SECONDS = 60.0
"""After which a probe that is not answered means that the model is stuck."""
UNLOAD_SECONDS = 1.0
"""For the dead version to go; one that took requests with it never does, and does not disturb."""
RETRY_SECONDS = 5.0

UNANSWERED = (OSError, http.client.HTTPException)


class Stubs(Protocol):
    """Who knows the processes of models."""

    def stub(self, model: str) -> object:
        """None if there is no process for this model."""


class Supervisor:
    """Watches one model: that its process is there, and that it answers a real question.

    A model that somebody has unloaded, or is loading, is left alone.

    Args:
        door: of the server.
        stubs: knows the model's process.
        model: its name.
        config: its `config.pbtxt`, which is touched: Triton loads again only what has changed.
    """

    def __init__(self, door: Door, stubs: Stubs, model: str, config: Path) -> None:
        self._door = door
        self._stubs = stubs
        self._model = model
        self._config = config
        self._recovering = threading.Lock()
        self._recoveries = 0

    def watch(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        probing = threading.Thread(target=self._probe, args=(stop,), daemon=True)
        probing.start()
        while not stop.wait(LOOK_SECONDS):
            if self._has_died():
                self._recover("its process has died", self._recoveries, stop)

    def _has_died(self) -> bool:
        # Looked for twice: in between, it may have been loaded.
        return (
            self._stubs.stub(self._model) is None
            and self._is_ready()
            and self._stubs.stub(self._model) is None
        )

    def _is_ready(self) -> bool:
        try:
            return self._door.state(self._model) == "READY"
        except UNANSWERED:
            return False

    def _probe(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_SECONDS):
            recoveries = self._recoveries
            if not self._is_ready():
                continue
            problem = "it answers a question with an error"
            try:
                if self._door.answers(self._model, PATIENCE_SECONDS):
                    continue
            except UNANSWERED as error:
                problem = f"it does not answer: {error}"
            if self._is_ready():
                self._recover(problem, recoveries, stop)

    def _recover(self, problem: str, recoveries: int, stop: threading.Event) -> None:
        """Unloads and loads, until that succeeds.

        Args:
            recoveries: how many there were when the problem arose; another one may have mended it.
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
            self._door.unload(self._model)
            deadline = time.monotonic() + UNLOAD_SECONDS
            while self._door.state(self._model) == "UNLOADING" and time.monotonic() < deadline:
                time.sleep(UNLOAD_SECONDS / 10)
            self._config.touch()
            self._door.load(self._model)
        except (ConfigError, *UNANSWERED) as error:
            fields = {"model": self._model, "error": str(error)}
            logger.error("recovery failed", extra={FIELDS: fields})
            return False
        return True
