"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from glm_multiuser.server.anthropic.conversation import as_chat
from glm_multiuser.server.anthropic.events import MessageEvents, error_event, ping_event
from glm_multiuser.server.anthropic.requests import CountTokensRequest, MessagesRequest
from glm_multiuser.server.anthropic.response_models import MessageCard, TokenCount
from glm_multiuser.server.error_models import ANTHROPIC_ERRORS
from glm_multiuser.server.events import EventStream

router = APIRouter(tags=["anthropic"])


@router.post(
    "/v1/messages",
    response_model=MessageCard,
    responses={200: {"content": {"text/event-stream": {}}}, **ANTHROPIC_ERRORS},
)
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answers the last message of a conversation.

    With `stream`, returns an event stream from `message_start` to `message_stop`.
    """
    group = await as_chat(body).start(request)
    answer = MessageEvents(group)
    if body.stream:
        return EventStream(answer.encoded(), group.generations, error_event, ping_event)
    await group.run(request, answer.read())
    return JSONResponse(answer.message)


@router.post("/v1/messages/count_tokens", responses=ANTHROPIC_ERRORS)
async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Counts the prompt tokens of the same conversation in `/v1/messages`."""
    return TokenCount(input_tokens=await as_chat(body).count_tokens(request))
