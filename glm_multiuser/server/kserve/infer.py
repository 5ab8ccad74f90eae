"""`POST /v2/models/{name}/infer`: answers a batch of questions, given as tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from glm_multiuser.answer import GenerationResult
from glm_multiuser.server.disconnect import unless_disconnected
from glm_multiuser.server.generation import Generation
from glm_multiuser.server.kserve.infer_bodies import InferRequest, InferResponse
from glm_multiuser.server.kserve.infer_codec import (
    JSON_LENGTH,
    decompress,
    parse,
    read_inputs,
    response_of,
    split,
    wanted_outputs,
)
from glm_multiuser.server.kserve.questions import fields_of, question_of, rows_of
from glm_multiuser.server.kserve.served_model import VERSION, ServedModel
from glm_multiuser.server.kserve.starting import start
from glm_multiuser.server.request_context import service_of
from glm_multiuser.server.settings import most_answers

model_router = APIRouter()

BINARY: dict[str, Any] = {
    "description": f"JSON followed by the tensors' bytes; {JSON_LENGTH} is the length of the JSON.",
    "type": "string",
    "format": "binary",
}


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Inlines `$defs`, because references to them do not resolve inside an OpenAPI description."""
    definitions = schema.pop("$defs", {})

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(item) for item in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inline(definitions[part["$ref"].rpartition("/")[2]])
        return {key: inline(value) for key, value in part.items()}

    result: dict[str, Any] = inline(schema)
    return result


@model_router.post(
    "/infer",
    response_class=Response,
    responses={
        200: {
            "model": InferResponse,
            "content": {"application/octet-stream": {"schema": BINARY}},
        }
    },
    openapi_extra={
        "parameters": [
            {"name": JSON_LENGTH, "in": "header", "schema": {"type": "integer", "minimum": 0}},
            {
                "name": "Content-Encoding",
                "in": "header",
                "schema": {"type": "string", "enum": ["identity", "gzip", "deflate"]},
            },
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": inlined(InferRequest.model_json_schema())},
                "application/octet-stream": {"schema": BINARY},
            },
        },
    },
)
async def infer(request: Request, model: ServedModel) -> Response:
    """Answers N questions.

    Inputs are `prompt` and optionally `history` (earlier rounds as JSON), `temperature`,
    `max_token` and `history_len` (number of rounds to use). Outputs are `response`, and `history`
    with the new round. The body is read as bytes; its Content-Type is ignored.
    """
    limits = service_of(request).settings.limits
    body = decompress(
        await request.body(), request.headers.get("content-encoding"), limits.body_bytes
    )
    json, binary = split(body, request.headers.get(JSON_LENGTH))
    infer_request = parse(InferRequest, json)
    wanted = wanted_outputs(infer_request)
    inputs, shape = read_inputs(
        infer_request.inputs, binary, most_answers(limits, model.settings.engine)
    )
    parameters = infer_request.parameters.model_dump(exclude_unset=True)
    questions = [
        question_of(fields_of({**parameters, **row}), model.llm.default_params)
        for row in rows_of(inputs)
    ]
    generations = await start(request, model, questions, infer_request.parameters)
    try:
        results = await unless_disconnected(request, _finish_all(generations))
    finally:
        for generation in generations:
            generation.close()
    texts = {
        "response": [result.text for result in results],
        "history": [
            question.history_with(result.text) for question, result in zip(questions, results)
        ],
    }
    head = InferResponse(
        model_name=model.name, model_version=VERSION, id=infer_request.id, outputs=[]
    )
    return response_of(head, texts, shape, wanted)


async def _finish_all(generations: Sequence[Generation]) -> list[GenerationResult]:
    return await asyncio.gather(*(generation.finish() for generation in generations))
