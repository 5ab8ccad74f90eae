"""The deadline of a request, from its headers and parameters."""

from __future__ import annotations

from typing import Optional

from starlette.requests import Request

from glm_multiuser.server.kserve.fields import Parameters
from glm_multiuser.server.request_context import deadline_in

MICROSECONDS = 1e-6


def seconds_in(request: Request, parameters: Parameters) -> Optional[float]:
    """Returns the earlier deadline of header and body, in seconds; None without one."""
    given = [deadline_in(request.headers), (parameters.timeout or 0) * MICROSECONDS or None]
    return min((seconds for seconds in given if seconds is not None), default=None)
