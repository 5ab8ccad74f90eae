"""The model repository: states, loading and unloading."""

from __future__ import annotations

from typing import Annotated, Any, Optional

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from glm_multiuser.errors import CheckpointError, ConfigError
from glm_multiuser.server.bodies import NotBoolean, Strict
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.kserve.metadata import PARAMETERS, config_of
from glm_multiuser.server.kserve.served_model import VERSION
from glm_multiuser.server.kserve.tensors import wrong
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import caller_of, service_of
from glm_multiuser.server.settings import ServerSettings

router = APIRouter(prefix="/v2/repository")

STATES = {
    "ready": "READY",
    "loading": "LOADING",
    "restarting": "LOADING",
    "unloading": "UNLOADING",
    "unloaded": "UNAVAILABLE",
    "failed": "UNAVAILABLE",
}
JSON_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
NUMBER: TypeAdapter[int] = TypeAdapter(Annotated[int, NotBoolean])


class IndexRequest(BaseModel):
    """Which models to list."""

    ready: Annotated[bool, Field(strict=True, description="Only ready models.")] = False


class IndexEntry(BaseModel):
    """A model's state (READY, LOADING, UNLOADING or UNAVAILABLE) and its reason."""

    name: str
    version: str
    state: str
    reason: str


class LoadParameters(Strict):
    """How to load; files are not supported."""

    config: Annotated[
        Optional[str],
        Field(
            description='JSON as from `/config`, or only {"parameters": {"users": ...}}. Only '
            "`users`, `seq_length` and `max_queue` can be changed."
        ),
    ] = None


class LoadRequest(BaseModel):
    """How to load; an empty body changes nothing."""

    parameters: LoadParameters = LoadParameters()


class UnloadParameters(BaseModel):
    """Without effect: models do not depend on each other here."""

    unload_dependents: bool = False


class UnloadRequest(BaseModel):
    """Accepted, without effect."""

    parameters: UnloadParameters = UnloadParameters()


@router.post("/index")
async def index(request: Request, body: Optional[IndexRequest] = None) -> list[IndexEntry]:
    """Lists all models that can be loaded, with their states."""
    ready_only = body is not None and body.ready
    return [
        IndexEntry(name=model.name, version=VERSION, state=STATES[model.state], reason=model.reason)
        for model in service_of(request).models
        if model.state == "ready" or not ready_only
    ]


@router.post("/models/{name}/load")
async def load(request: Request, name: str, body: Optional[LoadRequest] = None) -> dict[str, Any]:
    """Loads a model, or reloads it if its configuration changes; returns when it is ready.

    Running requests are drained first. A number out of range, or a model that does not fit into
    memory, is rejected before any change; if loading fails, the model is reloaded as it was.
    """
    _check_control(request)
    service = service_of(request)
    model = _known(request, name, "load")
    config = body.parameters.config if body is not None else None
    try:
        changes = changes_of(config, model, service.settings) if config is not None else {}
        await service.models.load(name, **changes)
    except (ConfigError, CheckpointError) as error:
        raise APIError(400, "load_failed", f"failed to load {name!r}: {error}") from error
    return {}


@router.post("/models/{name}/unload")
async def unload(
    request: Request, name: str, body: Optional[UnloadRequest] = None
) -> dict[str, Any]:
    """Rejects new requests for a model, drains the running ones, and frees its memory."""
    _check_control(request)
    await service_of(request).models.unload(_known(request, name, "unload").name)
    return {}


def changes_of(config: str, model: Model, settings: ServerSettings) -> dict[str, int]:
    """Returns the `parameters` of a configuration as settings of the model.

    Raises:
        APIError: 400, not a JSON object, or a change of another setting.
    """
    try:
        given = JSON_OBJECT.validate_json(config)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise wrong("config", f"must be a JSON object: {problem}") from None
    current = config_of(model, settings)
    parameters = given.pop("parameters", {})
    for key, value in given.items():
        if key not in current or value != current[key]:
            raise wrong(
                f"config.{key}", f"cannot be changed; of parameters, {', '.join(PARAMETERS)} can"
            )
    if not isinstance(parameters, dict):
        raise wrong("config.parameters", "must be a JSON object")
    return {name: _number(name, value) for name, value in parameters.items()}


def _number(name: str, value: Any) -> int:
    if name not in PARAMETERS:
        raise wrong(f"config.parameters.{name}", f"is unknown; there are {', '.join(PARAMETERS)}")
    if isinstance(value, dict):
        value = value.get("string_value")
    try:
        return NUMBER.validate_python(value)
    except ValidationError:
        raise wrong(
            f"config.parameters.{name}",
            f'is {value!r}; it must be a whole number, or {{"string_value": "a whole number"}}',
        ) from None


def _check_control(request: Request) -> None:
    """Raises APIError (403) unless this client may load and unload models."""
    control = service_of(request).settings.model_control
    if control == "all" or (control == "keys" and caller_of(request).admin):
        return
    rule = "needs an API key with the role admin" if control == "keys" else "is disabled"
    raise APIError(
        403,
        "model_control",
        f"--model-control is {control or 'none'!r}: loading and unloading models {rule}",
    )


def _known(request: Request, name: str, verb: str) -> Model:
    """Returns the model; like Triton, answers 400 instead of 404 if there is none."""
    try:
        return service_of(request).models.get(name)
    except APIError as error:
        message = f"failed to {verb} {name!r}: {error}"
        raise APIError(400, error.code, message, field="model") from None
