"""`POST /v1/responses`, its `input_tokens`, and `GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

import asyncio
from typing import Any, Optional

from fastapi import APIRouter, Request
from starlette.responses import Response

from glm_multiuser.server.error_models import OPENAI_ERRORS
from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.events import EventStream
from glm_multiuser.server.large_json import LargeJSONResponse
from glm_multiuser.server.request_context import caller_of, session_of
from glm_multiuser.server.response_store import ResponseStore
from glm_multiuser.server.responses_api.conversation import as_chat, messages_after
from glm_multiuser.server.responses_api.events import ResponseEvents
from glm_multiuser.server.responses_api.requests import ResponseRequest
from glm_multiuser.server.responses_api.response_models import (
    DeletedResponse,
    InputTokens,
    ResponseCard,
)

router = APIRouter(tags=["responses"])


@router.post(
    "/v1/responses",
    response_model=ResponseCard,
    responses={200: {"content": {"text/event-stream": {}}}, **OPENAI_ERRORS},
)
async def responses(request: Request, body: ResponseRequest) -> Response:
    """Answers the last item of a conversation.

    With `stream`, returns an event stream from `response.created` to `response.completed`,
    `response.incomplete` or `response.failed`.
    """
    store, user = _store_of(request), _user_of(request, body.user)
    if body.store and user is None:
        why = "responses are stored for a session: name it in the header X-Session-Id or in user"
        raise bad_request(f"store is true; {why}", field="store")
    chat = as_chat(body, store.messages_before(user, body.previous_response_id))
    group = await chat.start(request)

    def on_end(response: dict[str, Any]) -> None:
        if body.store and user is not None:
            store.put(user, response, messages_after(chat, response["output"]))

    answer = ResponseEvents(group, body, on_end)
    if body.stream:
        return EventStream(answer.encoded(), group.generations, answer.error_event)
    await group.run(request, answer.read())
    # Log-probabilities of long answers take a second to write.
    return await asyncio.to_thread(LargeJSONResponse, answer.response)


@router.post("/v1/responses/input_tokens", responses=OPENAI_ERRORS)
async def input_tokens(request: Request, body: ResponseRequest) -> InputTokens:
    """Counts the prompt tokens of the same conversation in `/v1/responses`."""
    user = _user_of(request, body.user)
    before = _store_of(request).messages_before(user, body.previous_response_id)
    return InputTokens(input_tokens=await as_chat(body, before).count_tokens(request))


@router.get("/v1/responses/{response_id}", response_model=ResponseCard, responses=OPENAI_ERRORS)
async def stored_response(request: Request, response_id: str, stream: bool = False) -> Response:
    """Returns a stored response of the session in the header X-Session-Id."""
    if stream:
        # OpenAI's client would parse the JSON as a stream without events.
        why = "stored responses are not streamed; it can only be false"
        raise bad_request(f"stream: {why}", field="stream")
    found = _store_of(request).get(_user_of(request), response_id)
    return Response(found.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", responses=OPENAI_ERRORS)
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    """Deletes a stored response of the session in the header X-Session-Id."""
    _store_of(request).delete(_user_of(request), response_id)
    return DeletedResponse(id=response_id)


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _user_of(request: Request, from_body: Optional[str] = None) -> Optional[str]:
    return caller_of(request).user(session_of(request, from_body))
