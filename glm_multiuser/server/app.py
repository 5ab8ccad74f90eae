"""The web application: which protocol answers which path, and what stands in front of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server import openai, simple, status, step
from glm_multiuser.server.bodies import problem_of
from glm_multiuser.server.disconnect import ClientGone
from glm_multiuser.server.errors import BAD_REQUEST, Refusal, error_response, refusal_of
from glm_multiuser.server.guard import Guard
from glm_multiuser.server.keys import KeyRing
from glm_multiuser.server.kserve import routes as kserve
from glm_multiuser.server.request_log import RequestLog
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
CLIENT_CLOSED_REQUEST = 499
"""Nobody will read it; it stands in the log (nginx's number for this)."""


def create_app(service: Service) -> ASGIApp:
    """Everything that this server answers, behind the guard and the request log."""
    app = FastAPI(
        title="glm_multiuser",
        description="Many users on one GLM.",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    entries = step.Entries(service.settings.limits)
    app.state.step_entries = entries
    service.metrics.step_entries.set_function(lambda: len(entries))
    for protocol in (openai, kserve, step, simple, status):
        app.include_router(protocol.router)
    app.add_api_route("/", page, methods=["GET"], response_class=HTMLResponse, tags=["page"])
    app.mount("/static", _PageFiles(directory=STATIC), name="static")
    app.add_exception_handler(GLMMultiUserError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(Exception, on_defect)
    return behind_the_door(app, service.settings, service.hear_response)


def behind_the_door(
    app: ASGIApp, settings: ServerSettings, answered: Callable[[int], None]
) -> ASGIApp:
    """`app` behind the guard and the request log.

    Args:
        app: what answers.
        settings: with keys, limits and origins.
        answered: hears the status of every response.
    """
    guarded: ASGIApp = Guard(app, KeyRing(settings.keys), settings.limits, settings.cors_origins)
    if settings.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-session-id", "x-request-timeout"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestLog(guarded, answered)


class _PageFiles(StaticFiles):
    """Asked for anew each time: parts of two versions of the page would not fit together."""

    def file_response(self, *args: Any, **settings: Any) -> Response:
        response = super().file_response(*args, **settings)
        response.headers["Cache-Control"] = "no-cache"
        return response


async def page() -> Response:
    """The web page; what it shows it asks for with the visitor's key."""
    return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)


def on_error(request: Request, error: Exception) -> Response:
    """An error of this library says what is wrong."""
    refusal = refusal_of(error)
    if refusal.status == 500:
        logger.error("request failed", exc_info=error)
    return error_response(request.url.path, refusal)


def on_defect(request: Request, error: Exception) -> Response:
    """Says nothing about it; the request log has the traceback."""
    return error_response(request.url.path, refusal_of(error))


def on_invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or has a field of the wrong type."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    first: dict[str, Any] = problems[0] if problems else {}
    # The first part says where the fields are.
    field, message = problem_of(first, first.get("loc", ())[1:])
    return error_response(request.url.path, Refusal(400, BAD_REQUEST, message, field=field))


def on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    status_code = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else ""
    codes = {404: "not_found", 405: "method_not_allowed"}
    refusal = Refusal(
        status_code,
        codes.get(status_code, BAD_REQUEST),
        f"{request.method} {request.url.path}: {detail}",
    )
    response = error_response(request.url.path, refusal)
    if status_code == 405:
        response.headers["Allow"] = ", ".join(_methods(request) or ("GET", "HEAD"))  # files
    return response


def _methods(request: Request) -> list[str]:
    """What this path can be asked, by whichever of its routes."""
    routes = request.app.router.routes
    return [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL for route in routes
        )
    ]


def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody is there any more."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
