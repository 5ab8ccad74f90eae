"""Starts the generations of a request, with its session and its deadline."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from glm_multiuser.server.generation import Generation
from glm_multiuser.server.kserve.fields import Parameters
from glm_multiuser.server.kserve.questions import Question
from glm_multiuser.server.models import Model
from glm_multiuser.server.request_context import caller_of, deadline_in, service_of, session_of

MICROSECONDS = 1e-6


async def start(
    request: Request, model: Model, questions: Sequence[Question], parameters: Parameters
) -> list[Generation]:
    """Starts all questions or none; the earlier deadline of header and body counts.

    Raises:
        APIError: an invalid header, or as `Service.start`.
    """
    given = [deadline_in(request.headers), (parameters.timeout or 0) * MICROSECONDS or None]
    return await service_of(request).start(
        caller_of(request),
        model,
        [question.request for question in questions],
        session_of(request, parameters.session),
        min((seconds for seconds in given if seconds is not None), default=None),
    )
