"""`POST /v2/models/{name}/generate` and `/generate_stream`: one question as plain JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Optional

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.errors import APIError, plain_body
from glm_multiuser.server.events import EventStream, event
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.kserve.fields import Fields, Text
from glm_multiuser.server.kserve.questions import Question, fields_of, question_of
from glm_multiuser.server.kserve.served_model import VERSION, ServedModel
from glm_multiuser.server.kserve.starting import start
from glm_multiuser.server.models import Model

model_router = APIRouter()


class GenerateRequest(Fields):
    """A question; its fields may be inside `parameters` or next to it."""

    id: Optional[Text] = None
    parameters: Optional[Fields] = None


class GenerateResponse(BaseModel):
    """The outputs by name, and `text_output` if the question was in `text_input`."""

    id: Optional[str] = None
    model_name: str
    model_version: str
    response: str
    text_output: Optional[str] = None
    history: str


@model_router.post("/generate", response_model_exclude_none=True)
async def generate(request: Request, model: ServedModel, body: GenerateRequest) -> GenerateResponse:
    """Answers one question; returns the complete answer."""
    question, generation = await _start(request, model, body)
    try:
        result = await unless_disconnected(request, generation.finish())
    finally:
        generation.close()
    outputs = _outputs(body, model, result.text)
    return GenerateResponse(**outputs, history=question.history_with(result.text))


@model_router.post(
    "/generate_stream",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def generate_stream(request: Request, model: ServedModel, body: GenerateRequest) -> Response:
    """Streams the answer to one question as an event stream.

    Every event is JSON with the new text; the last one also has `history` and `finish_reason`, or
    is `{"error": ...}`.
    """
    question, generation = await _start(request, model, body)
    return EventStream(_events(body, model, question, generation), [generation], _error_event)


async def _start(
    request: Request, model: Model, body: GenerateRequest
) -> tuple[Question, Generation]:
    beside = body.model_dump(exclude={"id", "parameters"}, exclude_unset=True)
    inside = body.parameters.model_dump(exclude_unset=True) if body.parameters else {}
    fields = fields_of({**beside, **inside})
    question = question_of(fields, model.llm.default_params)
    (generation,) = await start(request, model, [question], fields)
    return question, generation


async def _events(
    body: GenerateRequest, model: Model, question: Question, generation: Generation
) -> AsyncIterator[bytes]:
    async for piece in generation:
        data = _outputs(body, model, piece.text)
        if piece.finish_reason is None and piece.text:
            yield event(data)
        elif piece.finish_reason is not None and generation.result is not None:
            history = question.history_with(generation.result.text)
            yield event({**data, "history": history, "finish_reason": piece.finish_reason})


def _outputs(body: GenerateRequest, model: Model, text: str) -> dict[str, Any]:
    outputs = {"model_name": model.name, "model_version": VERSION, "response": text}
    if body.id is not None:
        outputs["id"] = body.id
    inside = body.parameters and body.parameters.text_input
    if body.text_input is not None or inside is not None:
        outputs["text_output"] = text
    return outputs


def _error_event(error: APIError) -> bytes:
    return event(plain_body(error))
