"""The outermost layer: gives every request an id, and writes one line when it has been answered."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_multiuser.server.logs import FIELDS, request_id

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """ASGI middleware.

    Args:
        app: what answers.
        answered: hears the status of every response.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[int], None]) -> None:
        self.app = app
        self.answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(HEADER, "")
        current = wanted if ACCEPTED_ID.fullmatch(wanted) else uuid.uuid4().hex
        token = request_id.set(current)
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = current
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request failed")
            if not status:
                raise
        finally:
            if status:
                self.answered(status)
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status or "client went away",
                "seconds": round(time.monotonic() - started, 4),
            }
            logger.info("request", extra={FIELDS: fields})
            request_id.reset(token)
