"""Metadata of the server and its models, and model configurations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from glm_multiuser.server.kserve.served_model import VERSION, ServedModel
from glm_multiuser.server.kserve.signature import INPUTS, OUTPUTS, TensorSpec
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import service_of
from glm_multiuser.server.settings import ServerSettings, most_answers
from glm_multiuser.version import NAME, own_version

router = APIRouter()
model_router = APIRouter()

PLATFORM = "mindspore_glm"
EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "statistics",
]
PARAMETERS = ("users", "seq_length", "max_queue")
"""Settings in a model's configuration that reloading can change."""
CONFIG_TYPES = {"BYTES": "TYPE_STRING", "INT16": "TYPE_INT16"}


class ServerMetadata(BaseModel):
    """Name and version of the server, and its Triton extensions."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    """A tensor; -1 in a shape is the batch size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """A model and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@router.get("/v2")
async def server_metadata() -> ServerMetadata:
    """Returns name, version and extensions of the server."""
    return ServerMetadata(name=NAME, version=own_version(), extensions=EXTENSIONS)


@model_router.get("")
async def model_metadata(model: ServedModel) -> ModelMetadata:
    """Returns the tensors of a model, whether loaded or not."""
    return ModelMetadata(
        name=model.name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[_metadata(spec) for spec in INPUTS],
        outputs=[_metadata(spec) for spec in OUTPUTS],
    )


@model_router.get("/config")
async def model_config(request: Request, model: ServedModel) -> dict[str, Any]:
    """Returns a model's configuration, with the fields of Triton's `config.pbtxt`.

    Loading accepts it with other `parameters`.
    """
    return config_of(model, service_of(request).settings)


def config_of(model: Model, settings: ServerSettings) -> dict[str, Any]:
    """See `model_config`."""
    engine = model.settings.engine
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": NAME,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": most_answers(settings.limits, engine),
        "input": [{**_config(spec), "optional": spec.optional} for spec in INPUTS],
        "output": [_config(spec) for spec in OUTPUTS],
        "instance_group": [
            {
                "name": f"{model.name}_0",
                "kind": "KIND_CPU" if engine.device_target == "CPU" else "KIND_MODEL",
                "count": 1,
            }
        ],
        "parameters": {name: {"string_value": str(getattr(engine, name))} for name in PARAMETERS},
        "model_transaction_policy": {"decoupled": False},
    }


def _metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(name=spec.name, datatype=spec.datatype, shape=[-1, 1])


def _config(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": CONFIG_TYPES[spec.datatype], "dims": [1]}
