"""`/status` for the page's live panel: slots, queue and tokens per second; and `/metrics`."""

from __future__ import annotations

from typing import Any, Optional

from fastapi import APIRouter, Request, Response

from glm_multiuser.server.keys import Caller
from glm_multiuser.server.metrics import CONTENT_TYPE
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import caller_of, service_of
from glm_multiuser.server.service import Service

router = APIRouter(tags=["status"])

SESSIONS = ("in_memory", "memory_bytes", "on_disk", "disk_bytes", "restored", "restored_tokens")
"""Reported fields of `SessionCounts`; a folder shared by models counts for each."""


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """State of the server, its models and slots; users of other keys are not named."""
    service, caller = service_of(request), caller_of(request)
    ready = service.models.ready()
    stats = {model.name: model.llm.stats() for model in ready}
    rate = service.token_rate
    return {
        "state": _state(service),
        "loading": _loading(service),
        "models": [
            {
                "name": model.name,
                "state": model.state,
                "users": model.settings.engine.users,
                "seq_length": model.settings.engine.seq_length,
            }
            for model in service.models
        ],
        "slots": [slot for model in ready for slot in _slots(service, model, caller)],
        "queue": {
            "waiting": sum(one.waiting for one in stats.values()),
            "limit": sum(model.settings.engine.max_queue for model in ready),
        },
        "sessions": {
            name: sum(getattr(one.sessions, name) for one in stats.values()) for name in SESSIONS
        },
        "cache_bytes": {
            "reserved": sum(one.cache_reserved_bytes for one in stats.values()),
            "resident": sum(one.cache_resident_bytes for one in stats.values()),
        },
        "tokens_per_second": {
            "now": rate.per_second[-1] if rate.per_second else 0,
            "last_minute": list(rate.per_second),
        },
        "totals": {
            "requests": service.requests,
            "tokens_generated": sum(one.tokens_generated for one in stats.values()),
            "compiles_after_ready": sum(one.compiles_after_ready for one in stats.values()),
        },
    }


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


def _state(service: Service) -> str:
    return service.state if service.live else "failed"


def _loading(service: Service) -> Optional[dict[str, Any]]:
    for model in service.models:
        if model.progress is not None:
            done, total, what = model.progress
            return {"model": model.name, "done": done, "total": total, "what": what}
    return None


def _slots(service: Service, model: Model, caller: Caller) -> list[dict[str, Any]]:
    slots = []
    for number, slot in enumerate(model.llm.slots()):
        session = caller.session_of(slot.user)
        yours = session is not None or service.caller_of(slot.request) == caller
        slots.append(
            {
                "model": model.name,
                "slot": number,
                "state": slot.state,
                "user": session,
                "yours": yours,
                "prompt_tokens": slot.prompt_tokens,
                "generated_tokens": slot.generated_tokens,
            }
        )
    return slots
