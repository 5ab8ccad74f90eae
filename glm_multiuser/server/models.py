"""The models of a server: loads, unloads, and restarts failed ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.loading import OpenLLM, bring_up, check
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Attempts to restart a model whose engine failed."""


class Model:
    """A model and its state.

    Attributes:
        settings: those of its last load.
        state: "unloaded", "loading", "ready", "unloading", "restarting" or "failed".
        reason: message why it is not ready.
        progress: (done, total, what) while loading.
        created: Unix time of the last load.
        lost: whether its engine failed and could not be restarted.
        engine: the model itself, also while unloading.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.state = "unloaded"
        self.reason = ""
        self.progress: Optional[tuple[int, int, str]] = None
        self.created = int(time.time())
        self.lost = False
        self.engine: Optional[MultiUserLLM] = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def llm(self) -> MultiUserLLM:
        """The engine that runs requests.

        Raises:
            APIError: 503, the model is not ready.
        """
        if self.engine is None or self.state != "ready":
            raise APIError(
                503,
                "model_not_ready",
                f"model {self.name!r} is {self.state}{self.reason and ': ' + self.reason}",
                field="model",
            )
        return self.engine

    def set_state(self, state: str, reason: str = "") -> None:
        self.state, self.reason, self.progress = state, reason, None


class ModelHost:
    """The models of a server. Used on the event loop only.

    Args:
        settings: the models, and their memory budget.
        open_llm: opens a model; replaced in tests.
        on_opened: called after a model was opened.
    """

    def __init__(
        self,
        settings: ServerSettings,
        open_llm: OpenLLM,
        on_opened: Callable[[str, MultiUserLLM], None],
    ) -> None:
        self._settings = settings
        self._open_llm = open_llm
        self._on_opened = on_opened
        self._models = {model.name: Model(model) for model in settings.models}
        self._stopping = False
        self._changing = asyncio.Lock()
        """Models are loaded and unloaded one at a time: they share the device thread."""

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def ready(self) -> list[Model]:
        return [model for model in self if model.state == "ready"]

    def get(self, name: Optional[str]) -> Model:
        """Returns the model of this name; without a name, the first.

        Raises:
            APIError: 404, no such model.
        """
        model = self._models.get(name) if name else next(iter(self))
        if model is None:
            raise APIError(
                404,
                "model_not_found",
                f"model {name!r} is unknown; this server has {', '.join(self._models)}",
                field="model",
            )
        return model

    async def load(self, name: str, **changes: Any) -> None:
        """Loads a model, or reloads it if its settings change; returns when it is ready.

        If that fails, a model that was loaded is reloaded with its old settings.

        Args:
            name: of the model.
            changes: fields of its `EngineConfig`.

        Raises:
            APIError: 404, no such model.
            GLMMultiUserError: it cannot be loaded.
        """
        model = self.get(name)
        async with self._changing:
            engine = replace(model.settings.engine, **changes)
            settings = replace(model.settings, engine=engine)
            if model.state == "ready" and settings == model.settings:
                return
            others = [other for other in self if other is not model and other.engine is not None]
            before = model.settings
            replaced = before if model.engine is not None else None
            check(settings, [other.settings for other in others], self._settings, replaced)
            await self._close(model, "it is loaded again")
            model.settings = settings
            try:
                await self._open(model, "loading")
            except Exception:
                model.settings = before
                if replaced is not None and not self._stopping:
                    await self._open_again(model)
                raise

    async def unload(self, name: str) -> None:
        """Rejects new requests for a model, drains the running ones, and frees its memory.

        Raises:
            APIError: 404, no such model.
        """
        model = self.get(name)
        async with self._changing:
            await self._close(model, "it was unloaded")

    async def restart_failed(self) -> None:
        """Restarts models whose engine has failed; those that do not start stay failed."""
        for model in self.ready():
            if _failure_of(model) is None:
                continue
            async with self._changing:
                # Meanwhile, it may have been unloaded or reloaded.
                failure = _failure_of(model)
                if failure is not None:
                    await self._restart(model, failure)

    def stop_loading(self) -> None:
        """Cancels a load at its next graph, and loads no more models."""
        self._stopping = True

    async def close(self) -> None:
        """Closes all models; running requests are cancelled."""
        self.stop_loading()
        async with self._changing:
            for model in self:
                try:
                    await self._close(model, "the server is shutting down", drain=0.0)
                except Exception:  # the others have sessions to save
                    logger.exception("model %s could not be closed", model.name)

    async def _restart(self, model: Model, failure: Exception) -> None:
        logger.error("engine failed", extra={FIELDS: {"model": model.name, "error": str(failure)}})
        try:
            await self._close(model, f"its engine failed: {failure}", drain=0.0)
        except Exception:
            logger.exception("model %s could not be closed", model.name)
            model.lost = True
            return
        await self._open_again(model)

    async def _open_again(self, model: Model) -> None:
        """Reopens a model; marks it as lost if that fails `RESTARTS` times."""
        for _ in range(RESTARTS):
            try:
                await self._open(model, "restarting")
                return
            except Exception:
                logger.exception("model did not start again")
        model.lost = True

    async def _open(self, model: Model, state: str) -> None:
        model.set_state(state)
        started = time.monotonic()

        def progress(done: int, total: int, what: str) -> None:
            if self._stopping:
                raise APIError(503, "draining", "the server is shutting down")
            model.progress = (done, total, what)

        try:
            llm = await asyncio.to_thread(
                bring_up, model.settings, self._settings, progress, self._open_llm
            )
        except BaseException as error:
            model.set_state("failed", str(error))
            raise
        self._on_opened(model.name, llm)
        model.engine, model.created, model.lost = llm, int(time.time()), False
        model.set_state("ready")
        fields = {
            "model": model.name,
            "seconds": round(time.monotonic() - started, 3),
            "graphs": llm.stats().compiles,
        }
        logger.info("model ready", extra={FIELDS: fields})

    async def _close(self, model: Model, reason: str, drain: Optional[float] = None) -> None:
        if model.engine is not None:
            model.set_state("unloading", reason)
            seconds = self._settings.drain_seconds if drain is None else drain
            try:
                await asyncio.to_thread(model.engine.close, seconds)
            except Exception as error:
                model.set_state("failed", f"it could not be closed: {error}")
                raise
            model.engine = None
        model.lost = False
        model.set_state("unloaded", reason)


def _failure_of(model: Model) -> Optional[Exception]:
    """The error that made a model's engine close, if any."""
    return None if model.engine is None else model.engine.failure
