"""`GET /v1/models`."""

from __future__ import annotations

from datetime import datetime, timezone

from fastapi import APIRouter, Request

from glm_multiuser.server.error_models import OPENAI_ERRORS
from glm_multiuser.server.errors import APIError
from glm_multiuser.server.models import Model
from glm_multiuser.server.openai.response_models import ModelCard, ModelList
from glm_multiuser.server.request_context import service_of
from glm_multiuser.version import NAME

router = APIRouter()


@router.get("/v1/models", responses=OPENAI_ERRORS)
async def models(request: Request) -> ModelList:
    """Lists the models that are ready."""
    cards = [_card(model) for model in service_of(request).models.ready()]
    first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
    return ModelList(data=cards, first_id=first, last_id=last)


@router.get("/v1/models/{name}", responses=OPENAI_ERRORS)
async def model(request: Request, name: str) -> ModelCard:
    """Returns a model that is ready."""
    found = service_of(request).models.get(name)
    if found.state != "ready":
        raise APIError(404, "model_not_found", f"model {name!r} is {found.state}", field="model")
    return _card(found)


def _card(model: Model) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=model.created,
        owned_by=NAME,
        max_model_len=model.llm.max_length,
        display_name=model.name,
        created_at=datetime.fromtimestamp(model.created, timezone.utc),
    )
