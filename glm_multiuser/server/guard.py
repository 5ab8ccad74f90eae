"""The door: API key, origin of a page, and size of the body, before anything is parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Optional
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.server.errors import Refusal, error_response
from glm_multiuser.server.keys import KeyRing
from glm_multiuser.server.settings import Limits

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What needs no key, beside the page."""


class Guard:
    """ASGI middleware. What passes has `caller` in its state and its whole body at hand.

    Args:
        app: what answers.
        keys: that open the door.
        limits: of the body.
        origins: of pages that may ask, besides our own.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limits: Limits, origins: Sequence[str]) -> None:
        self.app = app
        self.keys = keys
        self.limits = limits
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is spoken here, so nothing else gets past
        headers = Headers(scope=scope)
        try:
            if not _is_open(scope):
                caller = self.keys.caller(headers.get("authorization"))
                scope.setdefault("state", {})["caller"] = caller
            self._check_origin(scope, headers)
            body = await self._body(headers, receive) if _has_body(scope) else b""
        except Refusal as refusal:
            await error_response(scope["path"], refusal)(scope, receive, send)
            return
        if body is None:
            return  # the client went away before it had sent everything
        if _has_body(scope):
            # Every body here is JSON, or read as bytes; clients often forget to say so.
            MutableHeaders(scope=scope)["content-type"] = "application/json"
        await self.app(scope, _first(body, receive), send)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A page of another origin may not make this browser's user ask in its name.

        Raises:
            Refusal: 403.
        """
        origin = headers.get("origin")
        if origin is None or not _has_body(scope) or origin in self.origins:
            return
        if _host_of(origin) != headers.get("host"):
            raise Refusal(403, "foreign_origin", f"pages of {origin!r} may not ask this server")

    async def _body(self, headers: Headers, receive: Receive) -> Optional[bytes]:
        """The whole body; None when the client goes away.

        Raises:
            Refusal: 413, too large; 408, too slow.
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
                raise Refusal(
                    408,
                    "body_timeout",
                    f"the body had not arrived after {self.limits.body_seconds:g} seconds",
                ) from None
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self.limits.body_bytes:
                raise self._too_large(f"more than {self.limits.body_bytes} bytes arrived")
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self, what: str) -> Refusal:
        return Refusal(413, "body_too_large", f"body: {what}; it may have {self.limits.body_bytes}")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _has_body(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PUT", "PATCH", "DELETE")


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or path == "/" or path.startswith("/static/")


def _first(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body, and then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return pending.pop() if pending else await receive()

    return receive_body
