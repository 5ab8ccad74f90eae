"""Triton's settings of logs, traces and shared memory, which are read-only here."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter
from pydantic import RootModel

from glm_multiuser.server.errors import APIError, bad_request
from glm_multiuser.server.kserve.infer_bodies import SHARED_MEMORY
from glm_multiuser.server.kserve.served_model import ServedModel

router = APIRouter()
memory_router = APIRouter()

TRACES = {"trace_level": ["OFF"]}


class Settings(RootModel[dict[str, Any]]):
    """Settings by name."""


@router.get("/v2/logging")
async def log_settings() -> dict[str, Any]:
    """Returns the logged levels; the log goes to the standard error stream."""
    root = logging.getLogger()
    return {
        "log_file": "",
        "log_info": root.isEnabledFor(logging.INFO),
        "log_warning": root.isEnabledFor(logging.WARNING),
        "log_error": root.isEnabledFor(logging.ERROR),
        "log_verbose_level": int(root.isEnabledFor(logging.DEBUG)),
    }


@router.post("/v2/logging")
async def update_log_settings(body: Settings) -> dict[str, Any]:
    """Rejects changes: the log is set up when the server starts."""
    return _unchanged(body.root, await log_settings())


@router.get("/v2/trace/setting")
async def trace_settings() -> dict[str, Any]:
    """This server writes no traces."""
    return TRACES


@router.post("/v2/trace/setting")
async def update_trace_settings(body: Settings) -> dict[str, Any]:
    """Rejects changes: this server writes no traces."""
    return _unchanged(body.root, TRACES)


@router.get("/v2/models/{name}/trace/setting")
async def model_trace_settings(model: ServedModel) -> dict[str, Any]:
    """This server writes no traces."""
    return TRACES


@router.post("/v2/models/{name}/trace/setting")
async def update_model_trace_settings(model: ServedModel, body: Settings) -> dict[str, Any]:
    """Rejects changes: this server writes no traces."""
    return _unchanged(body.root, TRACES)


@memory_router.get("/status")
async def regions() -> list[dict[str, Any]]:
    """Always empty: no region can be registered."""
    return []


@memory_router.get("/region/{region}/status")
async def region_status(region: str) -> list[dict[str, Any]]:
    """Rejected: there is no such region."""
    raise bad_request(f"region {region!r} is not registered; {SHARED_MEMORY}")


@memory_router.post("/region/{region}/register")
async def register(region: str) -> dict[str, Any]:
    """Rejected: this server does not read clients' memory."""
    raise APIError(400, "not_supported", f"region {region!r} is not registered; {SHARED_MEMORY}")


@memory_router.post("/unregister")
async def unregister_all() -> dict[str, Any]:
    """Nothing to do."""
    return {}


@memory_router.post("/region/{region}/unregister")
async def unregister(region: str) -> dict[str, Any]:
    """Nothing to do."""
    return {}


for kind in ("system", "cuda"):
    router.include_router(memory_router, prefix=f"/v2/{kind}sharedmemory")


def _unchanged(requested: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Raises APIError (400) unless every setting already has the requested value."""
    for name, value in requested.items():
        if value is not None and value != current.get(name):
            raise APIError(
                400,
                "not_supported",
                f"{name!r} cannot be changed while the server runs; the settings are {current}",
                field=name,
            )
    return current
