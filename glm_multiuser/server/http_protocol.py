"""HTTP/1.1: uvicorn's protocol, with limits on headers and idle clients."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from typing import Any, Callable, Optional

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from glm_multiuser.server.errors import APIError, error_response
from glm_multiuser.server.http_1_0 import send_without_chunks
from glm_multiuser.server.logs import FIELDS
from glm_multiuser.server.upgrades import UpgradesIgnored

logger = logging.getLogger(__name__)

HEADER_SECONDS = 30.0
"""From connecting, or the first byte of a later request, to the end of its headers."""
SEND_SECONDS = 60.0
"""A client that reads nothing for longer is disconnected (backpressure)."""
HEAD_BYTES = 1 << 16
"""Maximum of request line and headers together; also of chunk extensions, and of trailers."""
URL_BYTES = 1 << 13
HEADER_FIELDS = 128
"""Maximum; a field of four bytes takes thirty times as much memory."""
PIPELINED = 32
"""Maximum number of requests that wait on a connection for an earlier one."""


class HTTPProtocol(UpgradesIgnored):
    """uvicorn's protocol, which has no limits on header size or on idle clients.

    Args:
        on_response: called with the status of each response written here.
        body_bytes: maximum of the bodies together that wait for an earlier request.
        options: of uvicorn's protocol.
    """

    url = b""
    _header_timer: Optional[asyncio.TimerHandle] = None
    _send_timer: Optional[asyncio.TimerHandle] = None
    _in_head = True
    _head_bytes = 0
    """Received since the last part of a body or end of a head; nothing else limits them."""
    _refusal: Optional[APIError] = None
    _running: Optional[RequestResponseCycle] = None
    """The request being answered; `cycle` is the one received last."""

    def __init__(
        self, *, on_response: Callable[[int], None], body_bytes: int, **options: Any
    ) -> None:
        super().__init__(**options)
        self._on_response = on_response
        self._body_bytes = body_bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = _by_its_own_address(self.client)
        # Any unsent byte calls pause_writing. With 0, ssl's transport would call it without one.
        transport.set_write_buffer_limits(high=1)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and self._is_idle:
            self._expect_header()
        while data and not self.transport.is_closing():
            piece = data[: HEAD_BYTES - self._head_bytes]
            data = data[len(piece) :]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._head_bytes >= HEAD_BYTES and not self.transport.is_closing():
                self._refusal = _headers_too_large(f"larger than {HEAD_BYTES} bytes")
                self.send_400_response("")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._refuse(APIError(414, "url_too_long", f"the URL is longer than {URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer; uvicorn would add it to the headers, after their check
        super().on_header(name, value)
        if len(self.headers) > HEADER_FIELDS:
            self._refuse(_headers_too_large(f"more than {HEADER_FIELDS}"))

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._stop_header_timer()
        if len(self.pipeline) >= PIPELINED:
            self._refuse(_pipeline_too_long(f"{PIPELINED} pipelined requests wait"))
        super().on_headers_complete()
        self._in_head = False  # not reached if the URL is invalid: there is no cycle then
        is_new = self.cycle is not None and self.cycle.scope is self.scope
        if is_new and self.scope["http_version"] < "1.1":
            send_without_chunks(self.cycle)
        if self.pipeline:
            self.flow.resume_reading()  # otherwise, a disconnect would not be noticed
        else:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)
        if self.pipeline:
            waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
            if waiting > self._body_bytes:
                what = f"{self._body_bytes} bytes of bodies of pipelined requests wait"
                self._refuse(_pipeline_too_long(what))
            self.flow.resume_reading()  # as above

    def on_message_complete(self) -> None:
        self._in_head = True  # of the next request
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # which uvicorn starts now
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Rejects invalid HTTP, or a request over a limit, and closes the connection."""
        error = self._refusal or APIError(400, "invalid_http", msg)
        client = self.client[0] if self.client else None
        fields = {"client": client, "status": error.status, "error": str(error)}
        logger.info("request rejected", extra={FIELDS: fields})
        if self._can_respond:
            response = error_response(self.url.decode("latin-1"), error)
            lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
            head = [STATUS_LINE[error.status], *lines, b"connection: close\r\n\r\n"]
            self.transport.write(b"".join([*head, bytes(response.body)]))
            self._on_response(error.status)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True  # uvicorn notifies the last request only
            running.message_event.set()

    @property
    def _is_idle(self) -> bool:
        """Whether no response is pending."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _can_respond(self) -> bool:
        """Whether a response now would answer the current request, and not mix with another."""
        if self._in_head:
            return self._is_idle
        return not self.pipeline and not self.cycle.response_started

    def _refuse(self, error: APIError) -> None:
        """Stops the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise error

    def _expect_header(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _expect_reading(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(SEND_SECONDS, self._check_reading, unsent)

    def _check_reading(self, unsent: int) -> None:
        if self.transport.get_write_buffer_size() < unsent:
            self._expect_reading()
            return
        fields = {"client": self.client[0] if self.client else None, "unsent_bytes": unsent}
        logger.warning(
            "client read nothing for %g seconds; closing its connection",
            SEND_SECONDS,
            extra={FIELDS: fields},
        )
        self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _headers_too_large(what: str) -> APIError:
    return APIError(431, "headers_too_large", f"headers: {what}")


def _pipeline_too_long(what: str) -> APIError:
    return APIError(400, "pipeline_too_long", f"more than {what} on this connection")


def _by_its_own_address(client: Optional[tuple[str, int]]) -> Optional[tuple[str, int]]:
    """Unmaps the IPv4 address of a client on a dual-stack socket; proxies are configured by it."""
    host = ipaddress.ip_address(client[0]) if client else None
    if client and isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped:
        return str(host.ipv4_mapped), client[1]
    return client
