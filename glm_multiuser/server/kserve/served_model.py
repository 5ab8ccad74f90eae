"""The model named in a path."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import service_of

VERSION = "1"
"""Of every model: a checkpoint has one version."""


async def served_model(request: Request, name: str) -> Model:
    """Returns the model of this name, in any state.

    Raises:
        APIError: 404, unknown model.
    """
    return service_of(request).models.get(name)


async def check_version(name: str, version: str) -> None:
    """Rejects every version except `VERSION`.

    Raises:
        APIError: 404.
    """
    if version != VERSION:
        raise APIError(
            404,
            "version_not_found",
            f"version {version!r} of model {name!r} is unknown; it has version {VERSION!r} only",
            field="version",
        )


ServedModel = Annotated[Model, Depends(served_model)]
