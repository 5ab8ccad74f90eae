"""The ASGI application: routes of all protocols, and middleware."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from glm_multiuser.errors import GLMMultiUserError, shown
from glm_multiuser.server import anthropic, health, openai, responses_api, simple, status, step
from glm_multiuser.server.bodies import problem_of
from glm_multiuser.server.cors import ClientCORSMiddleware
from glm_multiuser.server.disconnect import CLIENT_CLOSED_REQUEST, ClientDisconnected
from glm_multiuser.server.errors import BAD_REQUEST, APIError, api_error_of, error_response
from glm_multiuser.server.hosts import HostMiddleware, RootPathMiddleware
from glm_multiuser.server.keys import KeyRing
from glm_multiuser.server.kserve import routes as kserve
from glm_multiuser.server.middleware import GuardMiddleware
from glm_multiuser.server.request_log import RequestLogMiddleware
from glm_multiuser.server.response_store import ResponseStore
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import ServerSettings
from glm_multiuser.version import own_version

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Files from different versions of the page are incompatible.
    "Cache-Control": "no-cache",
}
"""Response headers of the page and its files."""
CORS_HEADERS = (
    *("authorization", "content-type", "x-session-id", "x-request-timeout", "x-request-id"),
    *("openai-organization", "openai-project", "user-agent", "x-api-key", "anthropic-version"),
    *("anthropic-beta", "anthropic-dangerous-direct-browser-access"),
)
"""Allowed cross-origin request headers, besides those that `ClientCORSMiddleware` allows."""


def create_app(service: Service) -> ASGIApp:
    """Creates the application: all routes, wrapped in middleware."""
    app = FastAPI(
        title="glm_multiuser",
        description="Multi-user GLM server.",
        version=own_version(),
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        servers=[{"url": service.settings.root_path}] if service.settings.root_path else None,
    )
    app.state.service = service
    entries = step.Entries(service.settings.limits)
    app.state.step_entries = entries
    app.state.response_store = ResponseStore(service.settings.limits)
    service.metrics.step_entries.set_function(lambda: len(entries))
    for protocol in (openai, responses_api, anthropic, kserve, step, simple, status, health):
        app.include_router(protocol.router)
    app.add_api_route("/", page, methods=["GET"], response_class=HTMLResponse, tags=["page"])
    app.mount("/static", _PageFiles(directory=STATIC), name="static")
    app.add_exception_handler(GLMMultiUserError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnected, on_client_disconnected)
    app.add_exception_handler(Exception, on_defect)
    traced: ASGIApp = app if service.tracer is None else service.tracer.wrap(app)
    return wrap_middleware(traced, service.settings, service.record_response)


def wrap_middleware(
    app: ASGIApp, settings: ServerSettings, on_response: Callable[[int], None]
) -> ASGIApp:
    """Wraps `app` in authentication, Host, Origin and body-size checks, CORS and the request log.

    Args:
        app: the application.
        settings: keys, limits, hosts and origins.
        on_response: called with the status of every response.
    """
    guarded: ASGIApp = GuardMiddleware(
        app, KeyRing(settings.keys, settings.admins), settings.limits, settings.cors_origins
    )
    if settings.cors_origins:
        guarded = ClientCORSMiddleware(
            guarded,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=CORS_HEADERS,
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    guarded = HostMiddleware(guarded, settings.allowed_hosts)
    if settings.root_path:
        guarded = RootPathMiddleware(guarded, settings.root_path)
    return RequestLogMiddleware(guarded, on_response)


class _PageFiles(StaticFiles):
    """Static files with the page's headers."""

    def file_response(self, *args: Any, **settings: Any) -> Response:
        response = super().file_response(*args, **settings)
        response.headers.update(PAGE_HEADERS)
        return response


async def page() -> Response:
    """The web page; its requests carry the visitor's API key."""
    return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)


async def on_error(request: Request, error: Exception) -> Response:
    """Handles errors of this library."""
    api_error = api_error_of(error)
    if api_error.status == 500:
        logger.error("request failed", exc_info=error)
    return error_response(request.url.path, api_error)


async def on_defect(request: Request, error: Exception) -> Response:
    """Handles defects: clients see no details; the request log has the traceback."""
    return error_response(request.url.path, api_error_of(error))


async def on_invalid(request: Request, error: Exception) -> Response:
    """Handles a body that is not JSON, or has a field of the wrong type."""
    if isinstance(error.__cause__, ValueError):
        return _unread(request, error.__cause__)
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    first: dict[str, Any] = problems[0] if problems else {}
    # The first part of the location is "body" or "query".
    field, message = problem_of(first, first.get("loc", ())[1:])
    return error_response(request.url.path, APIError(400, BAD_REQUEST, message, field=field))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handles unknown paths, wrong methods, and unreadable bodies."""
    status_code = error.status_code if isinstance(error, HTTPException) else 500
    if status_code == 400 and isinstance(error.__cause__, (ValueError, RecursionError)):
        return _unread(request, error.__cause__)
    detail = error.detail if isinstance(error, HTTPException) else ""
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path}: {detail}"
    api_error = APIError(status_code, codes.get(status_code, BAD_REQUEST), message)
    response = error_response(request.url.path, api_error)
    if status_code == 405:
        response.headers["Allow"] = ", ".join(_methods(request) or ("GET", "HEAD"))  # static files
    return response


def _unread(request: Request, cause: BaseException) -> Response:
    """Response to an unreadable body; FastAPI's own error omits the cause."""
    message = f"body: must be JSON in UTF-8: {cause}"
    encoding = request.headers.get("content-encoding")
    if encoding is not None:
        message += f"; Content-Encoding is {shown(encoding)}, it can only be left out here"
    return error_response(request.url.path, APIError(400, BAD_REQUEST, message))


def _methods(request: Request) -> list[str]:
    """Methods of this path, over all its routes."""
    routes = request.app.router.routes
    found = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL for route in routes
        )
    ]
    return ["GET", "HEAD", *found[1:]] if found[:1] == ["GET"] else found


async def on_client_disconnected(request: Request, error: Exception) -> Response:
    """Handles a disconnected client; the status is for the log."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
