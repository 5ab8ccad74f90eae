"""The step API, `POST /llm/generate`: every call returns the text since the last one.

A client chooses a `cache_id` for its generation and polls until the flag is "end".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from typing import Any, Literal, Optional

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from glm_multiuser.engine.waiting import has_room
from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.bodies import History, MaxLength, Temperature, TopP, as_history
from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.error_models import ERRORS
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.generation_request import GenerationRequest, sampling_of
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.request_context import caller_of, deadline_in, service_of, session_of
from glm_multiuser.server.settings import Limits

router = APIRouter(tags=["step"])

WAIT_SECONDS = 10.0
"""A call returns after this time even without a token: the request may still be queued."""
REMEMBERED = 4096
"""Number of ended generations whose names are still rejected."""


Flag = Literal["sending", "hang", "end"]


class StepRequest(BaseModel):
    """The first call of a `cache_id` starts a generation; later ones may repeat the fields."""

    cache_id: str = Field(min_length=1, max_length=128)
    query: str = ""
    history: Optional[History] = None
    model_name: Optional[str] = None
    temperature: Temperature = None
    top_p: TopP = None
    max_length: MaxLength = None
    do_sample: Optional[bool] = Field(None, description="false: greedy decoding.")


class StepResponse(BaseModel):
    """The text since the last call.

    flag: "sending": more will come; "hang": more will come, and the text so far ends inside a
    character; "end": nothing more will come.
    """

    flag: Flag
    delta_text: str


class Entry:
    """One generation that a client polls.

    Received text is kept until a call returns it: nothing is lost if a client disconnects while
    its call waits.

    Attributes:
        lock: held by the current call.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.generation: Optional[Generation] = None
        self.timer: Optional[asyncio.TimerHandle] = None
        self._texts: list[str] = []
        self._flag: Flag = "sending"
        self._error: Optional[GLMMultiUserError] = None

    async def receive(self, generation: Generation) -> None:
        """Waits for a piece, at most `WAIT_SECONDS`, and collects all that has arrived.

        Raises:
            GLMMultiUserError: the generation failed.
        """
        if self._error is not None:
            raise self._error
        with contextlib.suppress(asyncio.TimeoutError):
            if self._flag != "end":
                await asyncio.wait_for(self._receive_piece(generation), WAIT_SECONDS)
            while self._flag != "end" and generation.waiting_pieces:
                await self._receive_piece(generation)

    async def _receive_piece(self, generation: Generation) -> None:
        try:
            piece = await generation.__anext__()
        except GLMMultiUserError as error:
            self._error = error
            raise
        self._texts.append(piece.text)
        if piece.finish_reason is not None:
            self._flag = "end"
        else:
            self._flag = "hang" if piece.inside_character else "sending"

    def take(self) -> StepResponse:
        """The text received since the last call."""
        texts, self._texts = self._texts, []
        return StepResponse(flag=self._flag, delta_text="".join(texts))


Name = tuple[str, str]
"""(key, cache_id): ids are scoped to their key."""


class Entries:
    """The generations that clients poll; keys share `limits.step_entries`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[Name, Entry] = {}
        self._ended: OrderedDict[Name, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: Name) -> Entry:
        """Returns the entry of this name; creates it if there is none.

        Raises:
            APIError: 409, it has ended or is being polled; 410, it has expired; 429, too many.
        """
        if name in self._ended:
            status, code = (410, "expired") if self._ended[name] == "expired" else (409, "finished")
            raise APIError(status, code, f"cache_id {name[1]!r} has {code}; take a new one")
        entry = self._entries.get(name)
        if entry is None:
            self._check_room(name[0])
            entry = self._entries[name] = Entry()
        elif entry.lock.locked():
            raise APIError(409, "busy", f"cache_id {name[1]!r} is being polled by another call")
        return entry

    def _check_room(self, key: str) -> None:
        counts = Counter(key for key, _ in self._entries)
        if not has_room(counts, key, self._limits.step_entries):
            raise APIError(
                429,
                "too_many_generations",
                f"{len(self._entries)} generations are open; step_entries is "
                f"{self._limits.step_entries}",
                retry_after=self._limits.step_seconds,
            )

    def drop(self, name: Name) -> None:
        """Removes an entry whose generation never started."""
        self._entries.pop(name, None)

    def end(self, name: Name, how: str = "finished") -> None:
        """Ends the generation; its name is rejected from now on."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.generation is not None:
            entry.generation.close()
        self._ended[name] = how
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def wait_for_client(self, name: Name, entry: Entry) -> None:
        """Starts the timer that expires the generation; the client's next call cancels it."""
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(self._limits.step_seconds, self.end, name, "expired")


@router.post(
    "/llm/generate",
    response_model=StepResponse,
    responses={
        **ERRORS,
        409: {**ERRORS[400], "description": "This cache_id has ended, or another call polls it."},
        410: {
            **ERRORS[400],
            "description": "This cache_id was not polled in time and has expired.",
        },
    },
)
async def generate(request: Request, body: StepRequest) -> Any:
    """Starts or polls a generation; returns its text since the last call."""
    entries: Entries = request.app.state.step_entries
    caller = caller_of(request)
    name = (caller.key, body.cache_id)
    entry = entries.find(name)
    async with entry.lock:
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.generation is None:
            try:
                entry.generation = await _start(request, caller, body)
            except BaseException:
                entries.drop(name)
                raise
        try:
            await unless_disconnected(request, entry.receive(entry.generation))
        except GLMMultiUserError:
            entries.end(name)
            raise
        except BaseException:
            entries.wait_for_client(name, entry)
            raise
        step = entry.take()
        if step.flag == "end":
            entries.end(name)
        else:
            entries.wait_for_client(name, entry)
        return step


async def _start(request: Request, caller: Caller, body: StepRequest) -> Generation:
    service = service_of(request)
    model = service.models.get(body.model_name)
    temperature = 0.0 if body.do_sample is False else body.temperature
    params = sampling_of(model.llm.default_params, temperature=temperature, top_p=body.top_p)
    wanted = GenerationRequest(
        body.query, as_history(body.history or ()), params=params, max_length=body.max_length
    )
    (generation,) = await service.start(
        caller, model, [wanted], session_of(request), deadline_in(request.headers)
    )
    return generation
