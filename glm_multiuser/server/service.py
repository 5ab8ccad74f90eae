"""From a protocol's request to a running one: who may enter, which model, which user's slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from glm_multiuser.errors import PromptTooLongError
from glm_multiuser.sampling import SamplingParams
from glm_multiuser.server.admission import Admission
from glm_multiuser.server.ask import Ask, sampling_of
from glm_multiuser.server.errors import NOT_READY_RETRY_SECONDS, Refusal, refusal_of
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.loading import OpenLLM, open_llm
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.metrics import Metrics
from glm_multiuser.server.models import Model, ModelHost
from glm_multiuser.server.settings import ServerSettings
from glm_multiuser.server.token_rate import TokenRate

if TYPE_CHECKING:
    from glm_multiuser.llm import MultiUserLLM

logger = logging.getLogger(__name__)

LONG_PROMPT = 4096
"""Characters from which on a prompt is tokenized in another thread: some milliseconds of work."""

MEMORY_OF_SECONDS = 0.9
"""Weight of the past in the mean duration of a request."""


@dataclass(frozen=True)
class _Entered:
    """Whom a request was let in for."""

    model: Model
    caller: Caller
    user: Optional[str]


class Service:
    """What the protocols share. Lives on the event loop.

    Args:
        settings: models, limits and the like.
        open_llm: opens a model; tests put another in its place.

    Attributes:
        state: "starting", "ready" or "draining".
    """

    def __init__(self, settings: ServerSettings, open_llm: OpenLLM = open_llm) -> None:
        self.settings = settings
        self.state = "starting"
        self.metrics = Metrics(self._stats)
        self.models = ModelHost(settings, open_llm, self._opened)
        self.admission = Admission(settings.limits)
        self.token_rate = TokenRate()
        self.requests = 0
        """Answers that were started so far."""
        self._running: dict[int, tuple[Generation, Caller]] = {}
        self._mean_seconds = 1.0

    @property
    def live(self) -> bool:
        """Whether it makes sense to wait: false when a model is gone for good."""
        return not any(model.lost for model in self.models)

    @property
    def ready(self) -> bool:
        """Whether requests are taken, and no model is being started again."""
        restarting = any(model.state == "restarting" for model in self.models)
        return self.state == "ready" and self.live and not restarting

    def sampling(self, model: Model, **given: Any) -> SamplingParams:
        """The checkpoint's defaults, with what a request gives (None: nothing) in their place.

        Raises:
            InvalidParameterError: a value out of range.
        """
        return sampling_of(model.llm.default_params, **given)

    async def start(
        self,
        caller: Caller,
        model: Model,
        asks: Sequence[Ask],
        session: Optional[str] = None,
        seconds: Optional[float] = None,
    ) -> list[Generation]:
        """Puts requests into the queue, all of them or none.

        Args:
            caller: who asks.
            model: that is to answer.
            asks: several of one request do not wait for each other, so they run in any slots.
            session: whose slot a single request takes; None: any.
            seconds: deadline; at most the server's own.

        Raises:
            Refusal: 503 while starting or draining, 429 when too many are running.
            GLMMultiUserError: a prompt or parameter that cannot be, or a full queue.
        """
        limits = self.settings.limits
        seconds = min(seconds or limits.request_seconds, limits.request_seconds)
        try:
            self._refuse_unless_open()
            user = caller.user(session)
            all_ids = [await self._token_ids(model, ask) for ask in asks]
            self.admission.enter(caller, user, len(asks))
            return self._submit(_Entered(model, caller, user), asks, all_ids, seconds)
        except Exception as error:
            self.metrics.requests.labels(model.name, "refused").inc()
            raise refusal_of(error, self._retry_seconds(model)) from error

    def _submit(
        self,
        entered: _Entered,
        asks: Sequence[Ask],
        all_ids: Sequence[Sequence[int]],
        seconds: float,
    ) -> list[Generation]:
        """For requests that have entered; all that do not start leave again."""
        started: list[Generation] = []
        try:
            llm = entered.model.llm
            for ask, token_ids in zip(asks, all_ids):
                slot_of = entered.user if len(asks) == 1 else None
                params = _within(ask.max_length, len(token_ids), ask.params or llm.default_params)
                handle = llm.asubmit(token_ids, params, slot_of, reader=ask.reader(llm))
                leave = partial(self._leave, entered, ask, time.monotonic())
                generation = Generation(handle, seconds, leave)
                self._running[generation.number] = (generation, entered.caller)
                self.requests += 1
                started.append(generation)
        except BaseException:
            for generation in started:
                generation.close()
            for _ in asks[len(started) :]:
                self.admission.leave(entered.caller, entered.user)
            raise
        return started

    def caller_of(self, number: Optional[int]) -> Optional[Caller]:
        """Who sent the request of this number; None if it has ended."""
        running = self._running.get(number) if number is not None else None
        return running[1] if running else None

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    def hear_second(self) -> None:
        """Takes a sample of the speed; called once a second."""
        counts = {name: stats.tokens_generated for name, stats in self._stats().items()}
        self.token_rate.sample(counts)

    def hear_response(self, status: int) -> None:
        """Counts a response that was begun."""
        self.metrics.http_responses.labels(str(status)).inc()

    def abort_all(self, refusal: Refusal) -> None:
        """Ends every running request with this error."""
        for generation, _ in list(self._running.values()):
            generation.abort(refusal)

    def _refuse_unless_open(self) -> None:
        if self.state != "ready":
            raise Refusal(
                503,
                self.state,
                f"the server is {self.state}; it takes no requests",
                retry_after=NOT_READY_RETRY_SECONDS,
            )

    async def _token_ids(self, model: Model, ask: Ask) -> Sequence[int]:
        if ask.length > LONG_PROMPT:
            return await asyncio.to_thread(ask.token_ids, model.llm)
        return ask.token_ids(model.llm)

    def _leave(
        self, entered: _Entered, ask: Ask, since: float, generation: Generation, outcome: str
    ) -> None:
        model, caller = entered.model, entered.caller
        del self._running[generation.number]
        self.admission.leave(caller, entered.user)
        seconds = time.monotonic() - since
        self._mean_seconds += (1 - MEMORY_OF_SECONDS) * (seconds - self._mean_seconds)
        result = generation.result
        self.metrics.hear_end(model.name, outcome, result)
        fields: dict[str, Any] = {
            "model": model.name,
            "key": caller.key,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if self.settings.log_prompts:
            fields.update(ask.logged())
        if result is not None:
            fields["prompt_tokens"] = result.usage.prompt_tokens
            fields["completion_tokens"] = result.usage.completion_tokens
            fields["queued_seconds"] = round(result.timings.queued_s, 4)
            if self.settings.log_prompts:
                fields["answer"] = result.text
                fields["calls"] = [(call.name, call.arguments) for call in result.tool_calls]
        logger.info("generation ended", extra={FIELDS: fields})

    def _retry_seconds(self, model: Model) -> float:
        """When a place should be free: what waits, over what runs side by side."""
        if model.state != "ready":
            return NOT_READY_RETRY_SECONDS
        stats = model.llm.stats()
        return min(60.0, self._mean_seconds * (stats.waiting + 1) / stats.users)

    def _opened(self, name: str, llm: MultiUserLLM) -> None:
        llm.on_step(partial(self.metrics.hear_step, name))

    def _stats(self) -> dict[str, Any]:
        return {model.name: model.llm.stats() for model in self.models.ready()}


def _within(
    max_length: Optional[int], prompt_tokens: int, params: SamplingParams
) -> SamplingParams:
    """`params` whose answer ends when prompt and answer have `max_length` tokens.

    Raises:
        PromptTooLongError: the prompt leaves no room for an answer.
    """
    if max_length is None:
        return params
    room = max_length - prompt_tokens
    if room < 1:
        raise PromptTooLongError(
            f"max_length is {max_length}; the prompt alone has {prompt_tokens} tokens"
        )
    return replace(params, max_tokens=min(room, params.max_tokens or room))
