"""The simple API, `POST /`, for clients of a plain FastAPI wrapper around a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Optional, Union

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from glm_multiuser.answer import GenerationResult
from glm_multiuser.server.bodies import (
    History,
    HistoryMessage,
    MaxLength,
    MaxTokens,
    Seed,
    Temperature,
    TopP,
    as_history,
    with_round,
)
from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.error_models import ERRORS
from glm_multiuser.server.errors import APIError, plain_body
from glm_multiuser.server.events import EventStream, event
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.generation_request import GenerationRequest, sampling_of
from glm_multiuser.server.request_context import caller_of, deadline_in, service_of, session_of

router = APIRouter(tags=["simple"])


class SimpleRequest(BaseModel):
    """A question, optionally with earlier rounds."""

    prompt: str
    history: Optional[History] = None
    stream: Optional[bool] = None
    max_length: MaxLength = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    seed: Seed = None
    model: Optional[str] = None


class SimpleResponse(BaseModel):
    """The whole answer, and the history with this round added."""

    response: str
    history: list[Union[tuple[str, str], HistoryMessage]]
    status: int = 200
    time: str = Field(description="Completion time, YYYY-MM-DD HH:MM:SS.")
    finish_reason: str


@router.post("/", response_model=SimpleResponse, responses=ERRORS)
async def answer(request: Request, body: SimpleRequest) -> Any:
    """Answers one question.

    With `stream`, the response is an event stream: every event is JSON with a `delta` of the text;
    the last one also has all fields of the whole answer.
    """
    service = service_of(request)
    model = service.models.get(body.model)
    params = sampling_of(
        model.llm.default_params,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
    )
    wanted = GenerationRequest(
        body.prompt, as_history(body.history or ()), params=params, max_length=body.max_length
    )
    (generation,) = await service.start(
        caller_of(request), model, [wanted], session_of(request), deadline_in(request.headers)
    )
    if body.stream:
        return EventStream(_events(generation, body), [generation], _error_event)
    try:
        return _whole(await unless_disconnected(request, generation.finish()), body)
    finally:
        generation.close()


async def _events(generation: Generation, body: SimpleRequest) -> AsyncIterator[bytes]:
    async for piece in generation:
        if piece.finish_reason is None and piece.text:
            yield event({"delta": piece.text})
        elif piece.finish_reason is not None and generation.result is not None:
            whole = _whole(generation.result, body).model_dump()
            yield event({"delta": piece.text, **whole})


def _whole(result: GenerationResult, body: SimpleRequest) -> SimpleResponse:
    return SimpleResponse(
        response=result.text,
        history=with_round(body.history or (), body.prompt, result.text),
        time=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        finish_reason=result.finish_reason,
    )


def _error_event(error: APIError) -> bytes:
    return event({**plain_body(error), "status": error.status})
