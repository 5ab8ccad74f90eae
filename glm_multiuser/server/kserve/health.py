"""Liveness and readiness of the server and its models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.kserve.served_model import ServedModel
from glm_multiuser.server.request_context import service_of
from glm_multiuser.server.service import Service

router = APIRouter()
model_router = APIRouter()


class Live(BaseModel):
    """Liveness."""

    live: bool


class Loading(BaseModel):
    """Progress of loading a model."""

    model: str
    done: int
    total: int
    what: str


class Ready(BaseModel):
    """Whether the server accepts requests.

    state: "starting", "ready", "restarting", "draining", "failed", or "unloaded" if no model is
    ready.
    """

    ready: bool
    state: str
    loading: list[Loading]


class ModelReady(BaseModel):
    """A model that accepts requests."""

    name: str
    ready: bool


@router.get(
    "/v2/health/live", responses={503: {"model": Live, "description": "Restart the process."}}
)
async def live(request: Request, response: Response) -> Live:
    """Returns 503 if a model failed permanently: only a new process can help."""
    service = service_of(request)
    response.status_code = 200 if service.live else 503
    return Live(live=service.live)


@router.get("/v2/health/ready", responses={503: {"model": Ready, "description": "Not ready."}})
async def ready(request: Request, response: Response) -> Ready:
    """Returns 503 while the server starts, drains, restarts a failed model, or has none ready."""
    service = service_of(request)
    response.status_code = 200 if service.ready else 503
    loading = [
        Loading(model=model.name, done=done, total=total, what=what)
        for model in service.models
        if model.progress is not None
        for done, total, what in [model.progress]
    ]
    return Ready(ready=service.ready, state=_state(service), loading=loading)


@model_router.get("/ready")
async def model_ready(request: Request, model: ServedModel) -> ModelReady:
    """Returns 400, like Triton, while the model does not accept requests."""
    service = service_of(request)
    if model.state != "ready" or service.state != "ready":
        raise APIError(
            400,
            "model_not_ready",
            f"model {model.name!r} is {model.state}, the server is {_state(service)}",
        )
    return ModelReady(name=model.name, ready=True)


def _state(service: Service) -> str:
    if not service.live:
        return "failed"
    if service.ready or service.state != "ready":
        return service.state
    restarting = any(model.state == "restarting" for model in service.models)
    return "restarting" if restarting else "unloaded"
