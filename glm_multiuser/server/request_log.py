"""The outermost middleware: assigns request ids, and logs one line per request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.server.disconnect import CLIENT_CLOSED_REQUEST
from glm_multiuser.server.logs import FIELDS, request_id

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
"""Anthropic's clients read the id from this header."""
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestLogMiddleware:
    """Assigns an id to each request, returns it in the response, and logs the request.

    Args:
        app: the application.
        on_response: called with the status of every response that is sent.
    """

    def __init__(self, app: ASGIApp, on_response: Callable[[int], None]) -> None:
        self.app = app
        self.on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(HEADER, "")
        current = wanted if ACCEPTED_ID.fullmatch(wanted) else uuid.uuid4().hex
        token = request_id.set(current)
        started = time.monotonic()
        state = scope.setdefault("state", {})
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = headers[ANTHROPIC_HEADER] = current
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request failed")
            if not status:
                raise
        finally:
            if status not in (0, CLIENT_CLOSED_REQUEST):
                self.on_response(status)
            client, caller = scope.get("client"), state.get("caller")
            fields = {
                "client": client[0] if client else None,
                "key": caller.key if caller else None,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or "client disconnected",
                "seconds": round(time.monotonic() - started, 4),
            }
            logger.info("request", extra={FIELDS: fields})
            request_id.reset(token)
