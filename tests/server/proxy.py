"""A TCP proxy that simulates bad networks."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Optional
from urllib.parse import urlsplit

PATIENCE = 60.0


@dataclass(frozen=True)
class Fault:
    """Faults of every connection.

    Attributes:
        delay: seconds before each piece is forwarded, in both directions.
        piece: bytes forwarded at once.
        cut_request, cut_response: bytes of that direction before both sides are cut off.
        stall_response: bytes of the response before reading from the server stops.
        reset: whether to close with RST instead of FIN.
    """

    delay: float = 0.0
    piece: int = 65536
    cut_request: Optional[int] = None
    cut_response: Optional[int] = None
    stall_response: Optional[int] = None
    reset: bool = False

    @property
    def spares_the_answer(self) -> bool:
        return (self.cut_request, self.cut_response, self.stall_response) == (None, None, None)


class ChaosProxy:
    """Listens on a free port of the loopback interface, and forwards to a server.

    Args:
        url: of the server.
        fault: the simulated fault.

    Attributes:
        url: address for clients.
    """

    def __init__(self, url: str, fault: Fault) -> None:
        address = urlsplit(url)
        self._target = (address.hostname, address.port)
        self._fault = fault
        self._tasks: set[asyncio.Task[None]] = set()
        begun: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(begun)), name="proxy", daemon=True
        )
        self._thread.start()
        begun.result(PATIENCE)

    async def _serve(self, begun: Future[None]) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        begun.set_result(None)
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault, both = self._fault, [writer]
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
            both.append(to_server)
            ways = [
                asyncio.ensure_future(self._pump(reader, to_server, fault.cut_request, None)),
                asyncio.ensure_future(
                    self._pump(from_server, writer, fault.cut_response, fault.stall_response)
                ),
            ]
            try:
                # Whichever side ends first, both end.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for one in both:
                self._cut(one)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut: Optional[int],
        stall: Optional[int],
    ) -> None:
        passed = 0
        while True:
            limits = [limit - passed for limit in (cut, stall) if limit is not None]
            content = await reader.read(min([self._fault.piece, *limits]))
            if not content:
                return
            if self._fault.delay:
                await asyncio.sleep(self._fault.delay)
            writer.write(content)
            await writer.drain()
            passed += len(content)
            if cut is not None and passed >= cut:
                return
            if stall is not None and passed >= stall:
                await asyncio.Event().wait()

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        if self._fault.reset:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    def close(self) -> None:
        """Cuts every connection."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE)

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()
