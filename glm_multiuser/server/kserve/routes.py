"""The routes of KServe v2. Routes of a model exist with and without a version in the path."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from glm_multiuser.server.error_models import ERRORS
from glm_multiuser.server.kserve import (
    controls,
    generate,
    health,
    infer,
    metadata,
    repository,
    statistics,
)
from glm_multiuser.server.kserve.served_model import check_version

router = APIRouter(tags=["kserve v2"], responses=ERRORS)

for part in (health, metadata, statistics, repository, controls):
    router.include_router(part.router)

for part in (health, metadata, statistics, infer, generate):
    router.include_router(part.model_router, prefix="/v2/models/{name}")
    router.include_router(
        part.model_router,
        prefix="/v2/models/{name}/versions/{version}",
        dependencies=[Depends(check_version)],
    )
