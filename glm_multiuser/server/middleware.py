"""Middleware: authentication, Origin and body-size checks, before anything is parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Optional
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.server.errors import APIError, error_response
from glm_multiuser.server.keys import WRONG_KEY, KeyRing
from glm_multiuser.server.settings import Limits
from glm_multiuser.server.turns import Turns
from glm_multiuser.server.wrong_keys import WrongKeys

HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready", "/health", "/ping")
"""They need no API key; neither does the page."""
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
BODY_TIMEOUT = "body_timeout"

DISCARD_BYTES = 32 << 20
DISCARD_SECONDS = 5.0
"""Limits on what is received of a rejected body."""


class GuardMiddleware:
    """Authenticates requests, sets `caller` in their state, and receives their whole body.

    Args:
        app: the application.
        keys: the API keys.
        limits: on the body.
        origins: allowed origins besides our own (CORS).
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: Limits, origins: Sequence[str]) -> None:
        self.app = app
        self.keys = keys
        self.limits = limits
        self.origins = frozenset(origins)
        self.wrong_keys = WrongKeys()
        self.turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # WebSockets and lifespan events are not supported
        headers = Headers(scope=scope)
        receive = BodyReceive(receive)
        try:
            if not _is_open(scope):
                caller = self.keys.caller(headers.get("authorization"), headers.get("x-api-key"))
                scope.setdefault("state", {})["caller"] = caller
                await self.turns.wait(caller.key)
            self._check_origin(scope, headers)
            body = await self._body(headers, receive) if _has_body(scope) else b""
        except APIError as error:
            if error.code == WRONG_KEY:
                address, _ = scope.get("client") or ("", 0)
                await asyncio.sleep(self.wrong_keys.record(address))
            if _has_body(scope) and _closes(scope, headers) and error.code != BODY_TIMEOUT:
                await _discard(receive)
            await error_response(scope["path"], error)(scope, receive, send)
            return
        if body is None:
            return  # the client disconnected while sending
        if _has_body(scope):
            # Every body is JSON or read as bytes; many clients send another content type.
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn has its own scope, so it sends no body
        await self.app(scope, _first(body, receive), send)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Rejects cross-origin requests from pages that are not allowed (CSRF).

        Raises:
            APIError: 403.
        """
        origin = headers.get("origin")
        if origin is None or not _has_body(scope) or self.origins & {origin, "*"}:
            return
        if not _is_origin_of(origin, headers.get("host", "")):
            raise APIError(
                403, "foreign_origin", f"pages of {origin!r} may not send requests to this server"
            )

    async def _body(self, headers: Headers, receive: Receive) -> Optional[bytes]:
        """Receives the whole body; None if the client disconnects.

        Raises:
            APIError: 413, too large; 408, too slow.
        """
        announced = headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > self.limits.body_bytes:
            raise self._too_large(f"{announced} bytes are announced")
        deadline = time.monotonic() + self.limits.body_seconds
        body = bytearray()
        while True:
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise APIError(
                    408,
                    BODY_TIMEOUT,
                    f"the body had not arrived after {self.limits.body_seconds:g} seconds",
                ) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.limits.body_bytes:
                raise self._too_large(f"more than {self.limits.body_bytes} bytes arrived")
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self, what: str) -> APIError:
        return APIError(
            413, "body_too_large", f"body: {what}; it may have {self.limits.body_bytes}"
        )


class BodyReceive:
    """A `receive` that knows whether more of the body is to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self.more = message.get("more_body", False)
        return message


async def _discard(receive: BodyReceive) -> None:
    """Receives and drops the rest of a body, within limits.

    A connection that is closed with unread data is reset, and the client loses the response.
    """
    deadline = time.monotonic() + DISCARD_SECONDS
    left = DISCARD_BYTES
    while receive.more and left > 0:
        try:
            message = await asyncio.wait_for(receive(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            return
        left -= len(message.get("body", b""))


def _closes(scope: Scope, headers: Headers) -> bool:
    """Whether the connection ends with the response, and the client sends its body unasked."""
    if headers.get("expect", "").lower() == "100-continue":
        return False
    return scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()


def _is_origin_of(origin: str, host: str) -> bool:
    """Whether a page of this origin is from this host. Browsers leave out the default port of the
    origin's scheme; proxies may write it."""
    try:
        scheme, netloc, *_ = urlsplit(origin)
    except ValueError:
        return False
    port = DEFAULT_PORTS.get(scheme, "")
    return netloc != "" and netloc.removesuffix(port) == host.removesuffix(port)


def _has_body(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PUT", "PATCH", "DELETE")


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in HEALTH_PATHS or path == "/" or path.startswith("/static/")


def _first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then later messages."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return pending.pop() if pending else await receive()

    return receive_body
