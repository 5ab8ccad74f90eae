"""A client's connection, which must not stay open for nothing."""

from __future__ import annotations

import asyncio
from typing import Optional

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 30.0
"""From the first byte of a connection or request to the end of the request's header."""
ABORT = "abort"
"""In the state of a request's scope: closes the connection, whatever is still to be sent."""


class Connection(HttpToolsProtocol):
    """uvicorn's, which by itself waits for ever for a request that never becomes whole."""

    _timer: Optional[asyncio.TimerHandle] = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, ABORT: transport.abort}
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_header()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
