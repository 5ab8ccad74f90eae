"""The models of a server, by name: loading, unloading, and starting again what failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser.server.errors import NOT_READY_RETRY_SECONDS, Refusal
from glm_multiuser.server.loading import OpenLLM, bring_up, check
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Tries to start a model again whose engine failed."""


class Model:
    """One model and what it is doing.

    Attributes:
        settings: as it was loaded last.
        state: "unloaded", "loading", "ready", "unloading", "restarting" or "failed".
        reason: why it is not ready, for people.
        progress: (done, total, what) while it loads.
        created: Unix time of the last load.
        lost: whether its engine failed and could not be started again.
        engine: the model itself, also while it is on its way out.
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
        """What answers requests.

        Raises:
            Refusal: 503, the model is not ready.
        """
        if self.engine is None or self.state != "ready":
            raise Refusal(
                503,
                "model_not_ready",
                f"model {self.name!r} is {self.state}{self.reason and ': ' + self.reason}",
                field="model",
                retry_after=NOT_READY_RETRY_SECONDS,
            )
        return self.engine

    def become(self, state: str, reason: str = "") -> None:
        self.state, self.reason, self.progress = state, reason, None


class ModelHost:
    """Holds every model that this server knows. Lives on the event loop.

    Args:
        settings: which models, and what they may take.
        open_llm: opens one; tests put another in its place.
        opened: hears of every model that was opened.
    """

    def __init__(
        self,
        settings: ServerSettings,
        open_llm: OpenLLM,
        opened: Callable[[str, MultiUserLLM], None],
    ) -> None:
        self._settings = settings
        self._open_llm = open_llm
        self._opened = opened
        self._models = {model.name: Model(model) for model in settings.models}
        self._ending = False
        self._changing = asyncio.Lock()
        """Models are loaded and unloaded one at a time: they share the device thread."""

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def ready(self) -> list[Model]:
        return [model for model in self if model.state == "ready"]

    def get(self, name: Optional[str]) -> Model:
        """The model of this name; without one, the first.

        Raises:
            Refusal: 404, there is none.
        """
        model = self._models.get(name) if name else next(iter(self))
        if model is None:
            raise Refusal(
                404,
                "model_not_found",
                f"model {name!r} is unknown; this server has {', '.join(self._models)}",
                field="model",
            )
        return model

    async def load(self, name: str, **changes: Any) -> None:
        """Loads a model, or loads it again when something about it changes; returns when ready.

        Args:
            name: of the model.
            changes: of its settings: `users`, `seq_length` or `max_queue`.

        Raises:
            Refusal: 404, no such model.
            GLMMultiUserError: it cannot be loaded.
        """
        model = self.get(name)
        async with self._changing:
            settings = replace(model.settings, **changes)
            if model.state == "ready" and settings == model.settings:
                return
            others = [other for other in self if other is not model and other.engine is not None]
            check(settings, [other.settings for other in others], self._settings)
            await self._close(model, "it is loaded again")
            model.settings = settings
            await self._open(model, "loading")

    async def unload(self, name: str) -> None:
        """Takes no more requests for a model, lets those that run end, and frees its memory.

        Raises:
            Refusal: 404, no such model.
        """
        model = self.get(name)
        async with self._changing:
            await self._close(model, "it was unloaded")

    async def restart_failed(self) -> None:
        """Starts every model again whose engine has failed; those that do not start stay failed."""
        for model in self.ready():
            if _failure_of(model) is None:
                continue
            async with self._changing:
                # Meanwhile somebody may have unloaded it, or loaded it again.
                failure = _failure_of(model)
                if failure is not None:
                    await self._restart(model, failure)

    def end(self) -> None:
        """What is being loaded gives up at its next graph; nothing is loaded any more."""
        self._ending = True

    async def close(self) -> None:
        """Closes every model; what still runs is cancelled."""
        self.end()
        async with self._changing:
            for model in self:
                await self._close(model, "the server ends", drain=0.0)

    async def _restart(self, model: Model, failure: Exception) -> None:
        logger.error("engine failed", extra={FIELDS: {"model": model.name, "error": str(failure)}})
        await self._close(model, f"its engine failed: {failure}", drain=0.0)
        for _ in range(RESTARTS):
            try:
                await self._open(model, "restarting")
                return
            except Exception:
                logger.exception("model did not start again")
        model.lost = True

    async def _open(self, model: Model, state: str) -> None:
        model.become(state)
        started = time.monotonic()

        def progress(done: int, total: int, what: str) -> None:
            if self._ending:
                raise Refusal(503, "draining", "the server ends")
            model.progress = (done, total, what)

        try:
            llm = await asyncio.to_thread(
                bring_up, model.settings, self._settings, progress, self._open_llm
            )
        except BaseException as error:
            model.become("failed", str(error))
            raise
        self._opened(model.name, llm)
        model.engine, model.created, model.lost = llm, int(time.time()), False
        model.become("ready")
        fields = {
            "model": model.name,
            "seconds": round(time.monotonic() - started, 3),
            "graphs": llm.stats().compiles,
        }
        logger.info("model ready", extra={FIELDS: fields})

    async def _close(self, model: Model, reason: str, drain: Optional[float] = None) -> None:
        if model.engine is not None:
            model.become("unloading", reason)
            seconds = self._settings.drain_seconds if drain is None else drain
            await asyncio.to_thread(model.engine.close, seconds)
            model.engine = None
        model.lost = False
        model.become("unloaded", reason)


def _failure_of(model: Model) -> Optional[Exception]:
    """What closed the engine of a model by itself."""
    return None if model.engine is None else model.engine.failure
