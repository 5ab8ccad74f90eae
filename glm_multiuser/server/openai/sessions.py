"""`GET /v1/sessions` and `DELETE /v1/sessions/{id}`: the stored sessions of the caller's key.

An extension of this server; OpenAI has no such endpoints.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Optional

from fastapi import APIRouter, Request
from pydantic import BaseModel

from glm_multiuser.errors import SessionError
from glm_multiuser.server.error_models import OPENAI_ERRORS
from glm_multiuser.server.errors import APIError, bad_request
from glm_multiuser.server.request_context import caller_of, service_of

router = APIRouter()


class SessionCard(BaseModel):
    """A session; `id` is null if no request has named it since the server started, because files
    contain no names, and `tokens` is null if it is only on disk."""

    id: Optional[str]
    object: Literal["session"] = "session"
    model: str
    place: Literal["slot", "memory", "disk"]
    tokens: Optional[int]
    bytes: int


class SessionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SessionCard]


class SessionDeleted(BaseModel):
    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: Literal[True] = True


@router.get("/v1/sessions", responses=OPENAI_ERRORS)
async def sessions(request: Request) -> SessionList:
    """Lists the sessions of the caller's key, for all ready models; 503 if none is ready."""
    service, caller = service_of(request), caller_of(request)
    cards = []
    for model in service.models.ready() or service.models:
        infos = await asyncio.to_thread(model.llm.sessions, caller.owner)
        cards += [
            SessionCard(
                id=caller.session_of(info.user),
                model=model.name,
                place=info.place,
                tokens=info.tokens,
                bytes=info.nbytes,
            )
            for info in infos
        ]
    return SessionList(data=cards)


@router.delete("/v1/sessions/{session:path}", responses=OPENAI_ERRORS)
async def delete_session(request: Request, session: str) -> SessionDeleted:
    """Deletes a session of the caller's key, for all models: from its slot, memory and disk.
    Succeeds even if nothing is stored; 503 while a model that keeps sessions on disk is not ready,
    and then nothing is deleted; 500 if a file cannot be removed, after all others."""
    service, caller = service_of(request), caller_of(request)
    user = caller.user(session)
    if user is None:
        raise bad_request("the session has no name", field="id")
    models = [
        model.llm
        for model in service.models
        if model.state == "ready" or model.settings.engine.session_dir
    ]
    failure: Optional[SessionError] = None
    for llm in models:
        try:
            await asyncio.to_thread(llm.forget, user, owner=caller.owner)
        except SessionError as error:
            failure = error
    if failure is not None:
        raise APIError(
            500,
            "session_not_deleted",
            f"session {session!r} is not deleted: a file of it cannot be removed; the server's log "
            "says why",
            field="id",
        ) from failure
    return SessionDeleted(id=session)
