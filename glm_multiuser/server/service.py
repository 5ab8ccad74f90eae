"""Starts the requests of all protocols: admission, model, and the user's slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional

from glm_multiuser.server.admission import Admission
from glm_multiuser.server.compiling import GrammarQueue
from glm_multiuser.server.errors import (
    NOT_READY_RETRY_SECONDS,
    APIError,
    api_error_of,
    deadline_error,
)
from glm_multiuser.server.generation import Generation, OnEnd
from glm_multiuser.server.generation_request import GenerationRequest
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.loading import OpenLLM
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.metrics import Metrics
from glm_multiuser.server.models import Model, ModelHost
from glm_multiuser.server.settings import ServerSettings
from glm_multiuser.server.token_rate import TokenRate
from glm_multiuser.server.tracing import open_tracer

if TYPE_CHECKING:
    from glm_multiuser.handle import AsyncHandle
    from glm_multiuser.llm import MultiUserLLM
    from glm_multiuser.stats import EngineStats
    from glm_multiuser.structured.matcher import GrammarMatcher
    from glm_multiuser.token_ids import TokenIds

logger = logging.getLogger(__name__)

LONG_PROMPT = 4096
"""Longer prompts, in characters or ids, take milliseconds to tokenize: in another thread."""

MEMORY_OF_SECONDS = 0.9
"""Decay of the moving average of request durations."""


@dataclass(frozen=True)
class _Admitted:
    """An admitted request."""

    model: Model
    caller: Caller
    user: Optional[str]
    release: Callable[[], None]
    """Called at the end of each of its answers."""
    since: float
    """Arrival time, from `time.monotonic`."""
    seconds: float
    """From its arrival to its deadline."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.since + self.seconds - time.monotonic())


class Service:
    """Shared by all protocols. Used on the event loop only.

    Args:
        settings: models, limits, etc.
        open_llm: opens a model; replaced in tests.

    Attributes:
        state: "starting", "ready" or "draining".
        tracer: records OpenTelemetry spans; None: tracing is off.

    Raises:
        ConfigError: tracing is misconfigured, or not installed.
    """

    def __init__(self, settings: ServerSettings, open_llm: OpenLLM) -> None:
        self.settings = settings
        self.state = "starting"
        self.metrics = Metrics(self._stats)
        self.tracer = open_tracer(settings.otlp_endpoint)
        self.models = ModelHost(settings, open_llm, self._opened)
        self.admission = Admission(settings.limits)
        self.token_rate = TokenRate()
        self._grammars = GrammarQueue()
        self.requests = 0
        """Requests started so far."""
        self._running: dict[int, tuple[Generation, Caller]] = {}
        self._mean_seconds = 1.0

    @property
    def live(self) -> bool:
        """False if a model failed and could not be restarted."""
        return not any(model.lost for model in self.models)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted, a model is ready, and none is being restarted."""
        states = {model.state for model in self.models}
        answers = "ready" in states and "restarting" not in states
        return self.state == "ready" and self.live and answers

    async def start(
        self,
        caller: Caller,
        model: Model,
        requests: Sequence[GenerationRequest],
        session: Optional[str] = None,
        seconds: Optional[float] = None,
    ) -> list[Generation]:
        """Queues requests, all or none.

        Args:
            caller: the authenticated client.
            model: runs them.
            requests: several do not wait for each other, so they run in any slots.
            session: owns the slot of a single request; None: any slot.
            seconds: deadline; at most the server's own.

        Raises:
            APIError: 503 while starting or draining, 429 if too many are running, 504 if the
                deadline has passed before a grammar was compiled.
            GLMMultiUserError: a prompt or parameter is invalid, or the queue is full.
        """
        limits = self.settings.limits
        seconds = min(seconds or limits.request_seconds, limits.request_seconds)
        try:
            self._check_ready()
            user = caller.user(session)
            since = time.monotonic()
            release = self.admission.admit(caller, user, len(requests))
            admitted = _Admitted(model, caller, user, release, since, seconds)
            try:
                all_ids = await self._all_token_ids(model, requests)
                matchers = [await self._matcher(admitted, request) for request in requests]
            except BaseException:
                for _ in requests:
                    release()
                raise
            return self._submit(admitted, requests, all_ids, matchers)
        except Exception as error:
            self.metrics.requests.labels(model.name, "refused").inc()
            api_error = api_error_of(error, self._retry_seconds(model))
            if self.tracer is not None:
                self.tracer.rejected(model.name, requests[0], api_error.code)
            raise api_error from error

    def _submit(
        self,
        admitted: _Admitted,
        requests: Sequence[GenerationRequest],
        all_ids: Sequence[TokenIds],
        matchers: Sequence[Optional[GrammarMatcher]],
    ) -> list[Generation]:
        """Starts admitted requests, all or none; if none start, all are released."""
        started: list[tuple[AsyncHandle, GenerationRequest, float]] = []
        llm = admitted.model.llm
        try:
            for request, token_ids, matcher in zip(requests, all_ids, matchers):
                slot_of = admitted.user if len(requests) == 1 else None
                params = request.sampling(llm.default_params, len(token_ids))
                since = time.monotonic()  # before the engine starts its own clock
                handle = llm.asubmit(
                    token_ids,
                    user=slot_of,
                    params=params,
                    reader=request.reader(llm),
                    group=admitted.caller.key,
                    owner=admitted.caller.owner,
                    matcher=matcher,
                )
                started.append((handle, request, since))
        except BaseException:
            for handle, _, _ in started:
                handle.close()
            for _ in requests:
                admitted.release()
            raise
        return [self._generation(admitted, *one) for one in started]

    def _generation(
        self, admitted: _Admitted, handle: AsyncHandle, request: GenerationRequest, since: float
    ) -> Generation:
        on_end: OnEnd = partial(self._on_end, admitted, request, since)
        if self.tracer is not None:
            on_end = self.tracer.watch(admitted.model.name, request, since, on_end)
        generation = Generation(handle, admitted.seconds, on_end, admitted.seconds_left)
        self._running[generation.number] = (generation, admitted.caller)
        self.requests += 1
        return generation

    def caller_of(self, number: Optional[int]) -> Optional[Caller]:
        """The client of the request with this number; None if it has ended."""
        running = self._running.get(number) if number is not None else None
        return running[1] if running else None

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def tick(self) -> None:
        """Samples the tokens per second; called once a second."""
        counts = {name: stats.tokens_generated for name, stats in self._stats().items()}
        self.token_rate.sample(counts)

    def record_response(self, status: int) -> None:
        """Counts a response that has started."""
        self.metrics.http_responses.labels(str(status)).inc()

    def abort_all(self, error: APIError) -> None:
        """Aborts all running requests with this error."""
        for generation, _ in list(self._running.values()):
            generation.abort(error)

    async def close(self) -> None:
        """Closes all models and exports the remaining traces."""
        await self.models.close()
        self._grammars.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def _check_ready(self) -> None:
        if self.state != "ready":
            raise APIError(
                503,
                self.state,
                f"the server is {self.state}; it accepts no requests",
            )

    async def token_ids(self, model: Model, request: GenerationRequest) -> TokenIds:
        """Tokenizes the prompt; a long one in another thread.

        Raises:
            InvalidParameterError: the prompt is invalid for this model.
        """
        if request.length > LONG_PROMPT:
            return await asyncio.to_thread(request.token_ids, model.llm)
        return request.token_ids(model.llm)

    async def _all_token_ids(
        self, model: Model, requests: Sequence[GenerationRequest]
    ) -> list[TokenIds]:
        """Tokenizes a prompt for several answers only once."""
        all_ids: list[TokenIds] = []
        for place, request in enumerate(requests):
            is_read = place > 0 and request.has_prompt_of(requests[place - 1])
            all_ids.append(all_ids[-1] if is_read else await self.token_ids(model, request))
        return all_ids

    async def _matcher(
        self, admitted: _Admitted, request: GenerationRequest
    ) -> Optional[GrammarMatcher]:
        """Compiles the request's grammar in another thread; None without one.

        Raises:
            QueueFullError: too many requests or grammars are waiting.
            APIError: 504, it was not compiled before the deadline.
            InvalidParameterError: the grammar cannot be served.
        """
        llm, limit = admitted.model.llm, admitted.model.settings.engine.max_queue
        params = request.params or llm.default_params
        if params.grammar is None:
            return None
        llm.check_queue(admitted.caller.key)
        compiling = self._grammars.run(
            admitted.caller.key,
            limit,
            llm.config.users,
            partial(
                llm.compile_grammar,
                params.grammar,
                continued=request.continue_final_message,
                raw=not request.is_text,
            ),
        )
        try:
            return await asyncio.wait_for(compiling, admitted.seconds_left)
        except asyncio.TimeoutError:
            raise deadline_error(admitted.seconds) from None

    def _on_end(
        self,
        admitted: _Admitted,
        request: GenerationRequest,
        since: float,
        generation: Generation,
        outcome: str,
    ) -> None:
        model, caller = admitted.model, admitted.caller
        del self._running[generation.number]
        admitted.release()
        seconds = time.monotonic() - since
        self._mean_seconds += (1 - MEMORY_OF_SECONDS) * (seconds - self._mean_seconds)
        result = generation.result
        self.metrics.record_finished(model.name, outcome, result)
        fields: dict[str, Any] = {
            "model": model.name,
            "key": caller.key,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if self.settings.log_prompts:
            fields.update(request.logged())
        if result is not None:
            fields["prompt_tokens"] = result.usage.prompt_tokens
            fields["completion_tokens"] = result.usage.completion_tokens
            fields["queued_seconds"] = round(result.timings.queued_s, 4)
            if self.settings.log_prompts:
                fields["answer"] = result.text
                fields["calls"] = [(call.name, call.arguments) for call in result.tool_calls]
        logger.info("generation ended", extra={FIELDS: fields})

    def _retry_seconds(self, model: Model) -> float:
        """Estimated seconds until a slot is free, at most 60."""
        if model.state != "ready":
            return NOT_READY_RETRY_SECONDS
        stats = model.llm.stats()
        return min(60.0, self._mean_seconds * (stats.waiting + 1) / stats.users)

    def _opened(self, name: str, llm: MultiUserLLM) -> None:
        llm.on_step(partial(self.metrics.record_step, name))

    def _stats(self) -> dict[str, EngineStats]:
        return {model.name: model.llm.stats() for model in self.models.ready()}
