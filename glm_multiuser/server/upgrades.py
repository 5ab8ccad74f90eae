"""Ignores `Upgrade`: requests that offer another protocol are answered in HTTP/1.1.

Java's HttpClient and `curl --http2` send `Upgrade: h2c`, which a server may ignore (RFC 9110, 7.8).
The parser treats data after the head of such a request as the other protocol's, and would lose the
body.
"""

from __future__ import annotations

from typing import Any, Optional

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class _RequestParser(httptools.HttpRequestParser):
    """Keeps the data after the head of an upgrade request."""

    rest: Optional[bytes] = None

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (end_of_head,) = upgrade.args
            self.rest = data[end_of_head:]


class UpgradesIgnored(HttpToolsProtocol):
    """uvicorn's protocol; parses upgrade requests again, without their header `Upgrade`."""

    parser: _RequestParser

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._use_new_parser()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        while self.parser is not None and self._is_offer and self.parser.rest is not None:
            # Each iteration consumes one head of the received data.
            head, rest = self._head_without_upgrade(), self.parser.rest
            self._use_new_parser()
            super().data_received(head + rest)

    def on_headers_complete(self) -> None:
        if not self._is_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_offer:
            super().on_message_complete()

    @property
    def _is_offer(self) -> bool:
        """Whether the parser has read the head of an upgrade request."""
        # The parser treats every CONNECT as one.
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _use_new_parser(self) -> None:
        self.parser = _RequestParser(self)
        if hasattr(self.parser, "set_dangerous_leniencies"):  # httptools 0.6.3; as uvicorn
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
