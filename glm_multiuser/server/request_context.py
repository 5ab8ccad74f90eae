"""Reads the service, caller, session and deadline from an HTTP request of any protocol."""

from __future__ import annotations

import math
from typing import Optional

from starlette.datastructures import Headers
from starlette.requests import Request

from glm_multiuser.server.errors import bad_request
from glm_multiuser.server.keys import Caller
from glm_multiuser.server.service import Service

SESSION_HEADER = "x-session-id"
DEADLINE_HEADER = "x-request-timeout"


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def caller_of(request: Request) -> Caller:
    """The authenticated client."""
    caller: Caller = request.state.caller
    return caller


def session_of(request: Request, from_body: Optional[str] = None) -> Optional[str]:
    """The session within the caller's key: from the header, else from the body."""
    return session_named(request.headers) or from_body


def session_named(headers: Headers) -> str:
    """The header X-Session-Id, in UTF-8 like names in bodies, else in Latin-1; empty: none."""
    name = headers.get(SESSION_HEADER, "")
    try:
        return name.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return name


def deadline_in(headers: Headers) -> Optional[float]:
    """Seconds of the header `X-Request-Timeout`; None without one.

    Raises:
        APIError: 400, not a positive number.
    """
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise bad_request(
            f"{DEADLINE_HEADER} is {text!r}; it must be a number of seconds above 0",
            field=DEADLINE_HEADER,
        )
    return seconds
