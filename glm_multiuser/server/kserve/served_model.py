"""The model that a path names."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from glm_multiuser.server.errors import APIError
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import service_of

VERSION = "1"
"""Of every model: a checkpoint has one version."""


async def served_model(request: Request, name: str) -> Model:
    """The model of this name, whatever it is doing.

    Raises:
        APIError: 404, there is none.
    """
    return service_of(request).models.get(name)


async def check_version(name: str, version: str) -> None:
    """Rejects every version but the only one.

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
