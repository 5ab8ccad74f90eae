"""The session and the deadline of a request, from its headers and parameters."""

from __future__ import annotations

from typing import Optional

from starlette.requests import Request

from glm_multiuser.server.kserve.fields import Parameters
from glm_multiuser.server.request_context import deadline_of, session_of

MICROSECONDS = 1e-6


def session_in(request: Request, parameters: Parameters) -> Optional[str]:
    """Returns the session within the caller's key."""
    return session_of(request, parameters.session)


def seconds_in(request: Request, parameters: Parameters) -> Optional[float]:
    """Returns the earlier deadline of header and body, in seconds; None without one."""
    given = [deadline_of(request), (parameters.timeout or 0) * MICROSECONDS or None]
    return min((seconds for seconds in given if seconds is not None), default=None)
