"""Model statistics, as far as they are measured."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from glm_multiuser.server.kserve.served_model import VERSION, ServedModel
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import service_of
from glm_multiuser.server.service import Service

router = APIRouter()
model_router = APIRouter()

SUCCESSES = ("stop", "length")


class Count(BaseModel):
    """How often something happened."""

    count: int


class Duration(Count):
    """How often something happened, and its total duration."""

    ns: int


class InferenceStatistics(BaseModel):
    """Requests that ended with an answer, those that did not, and engine steps.

    Requests are counted since the server started, steps since the model was loaded.
    """

    success: Count
    fail: Count
    queue: Duration
    compute_infer: Duration


class ModelStatistics(BaseModel):
    """Statistics of one model.

    inference_count: completed answers.
    execution_count: engine steps: prefills, and decode steps, which all users share.
    """

    name: str
    version: str
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics


class Statistics(BaseModel):
    """Statistics of one model, or of all that are loaded."""

    model_stats: list[ModelStatistics]


@router.get("/v2/models/stats")
async def all_statistics(request: Request) -> Statistics:
    """Returns the statistics of every model that is ready."""
    service = service_of(request)
    ready = service.models.ready()
    return Statistics(model_stats=[_statistics(service, model) for model in ready])


@model_router.get("/stats")
async def model_statistics(request: Request, model: ServedModel) -> Statistics:
    """Returns the statistics of one model. Unmeasured values are omitted, not reported as 0."""
    return Statistics(model_stats=[_statistics(service_of(request), model)])


def _statistics(service: Service, model: Model) -> ModelStatistics:
    success = fail = 0
    for metric in service.metrics.requests.collect():
        for sample in metric.samples:
            if sample.name != "glm_requests_total" or sample.labels["model"] != model.name:
                continue
            if sample.labels["outcome"] in SUCCESSES:
                success += int(sample.value)
            else:
                fail += int(sample.value)
    engine = model.llm.stats()
    return ModelStatistics(
        name=model.name,
        version=VERSION,
        inference_count=success,
        execution_count=engine.steps,
        inference_stats=InferenceStatistics(
            success=Count(count=success),
            fail=Count(count=fail),
            queue=_waiting(service, model),
            compute_infer=Duration(count=engine.steps, ns=int(engine.graph_seconds * 1e9)),
        ),
    )


def _waiting(service: Service, model: Model) -> Duration:
    """Returns how many requests have waited for a slot, and their total waiting time."""
    sums = {
        sample.name: sample.value
        for metric in service.metrics.queue_seconds.collect()
        for sample in metric.samples
        if sample.labels["model"] == model.name and "le" not in sample.labels
    }
    count, seconds = (sums.get(f"glm_queue_seconds_{name}", 0.0) for name in ("count", "sum"))
    return Duration(count=int(count), ns=int(seconds * 1e9))
