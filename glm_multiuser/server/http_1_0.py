"""HTTP/1.0 responses: no chunks, no `100 Continue`; closing the connection ends the body."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Makes uvicorn send this response without chunked encoding, and then close the connection.

    Must be called before the application starts.
    """
    cycle.waiting_for_100_continue = False  # RFC 9110, 10.1.1
    send = cycle.send
    has_length = False

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif message["type"] == "http.response.body" and not has_length:
            # Without chunked encoding, uvicorn checks bodies against an announced length.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
