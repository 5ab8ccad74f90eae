"""`/health`, `/ping` and `/version`, for load balancers and monitoring, as in vLLM."""

from __future__ import annotations

from typing import Any, Union

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from glm_multiuser.server.request_context import service_of
from glm_multiuser.version import own_version

router = APIRouter(tags=["health"])

NO_ANSWER: dict[Union[int, str], dict[str, Any]] = {
    503: {"description": "No model answers requests now."}
}


class Version(BaseModel):
    """The version of glm_multiuser."""

    version: str


@router.get("/health", response_class=Response, responses=NO_ANSWER)
@router.get("/ping", response_class=Response, responses=NO_ANSWER)
async def health(request: Request) -> Response:
    """200 when requests are answered, else 503; `/v2/health/ready` says why."""
    return Response(status_code=200 if service_of(request).ready else 503)


@router.get("/version")
async def version() -> Version:
    """The version of this server."""
    return Version(version=own_version())
