"""The server with a numpy model, in a thread of the test process, for fast starts.

Clients use real sockets; tests can access the engine and block it at every step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional
from unittest.mock import patch

from glm_multiuser import EngineConfig, MultiUserLLM, SamplingParams
from glm_multiuser.server.run import ServerLifecycle, listen
from glm_multiuser.server.service import Service
from glm_multiuser.server.settings import Limits, ModelSettings, ServerSettings
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.driving import PATIENCE as PATIENCE
from tests.engine.driving import wait_until as wait_until
from tests.engine.mock_runner import EOS, SEQ_LENGTH, Call, MockRunner

MODEL = "mock"
FOLDER = Path(__file__).resolve().parents[2] / "ckpt/glm-tiny"
"""Only its config.json is read."""


def mock_llm(
    settings: ModelSettings,
    before: Callable[[Call], None] = lambda call: None,
    params: Optional[SamplingParams] = None,
    chunk: Optional[int] = None,
    runner_class: type[MockRunner] = MockRunner,
    **options: Any,
) -> MultiUserLLM:
    """A numpy model that replaces `MultiUserLLM.from_pretrained`; causal with a chunk."""
    config = replace(settings.engine, seq_length=SEQ_LENGTH)
    runner: Any = runner_class(config.users, before, chunk=chunk)
    params = params or SamplingParams(temperature=0.0, max_tokens=64)
    return MultiUserLLM(runner, config, FakeTokenizer(), params, (EOS,), 0.0)


def mock_settings(
    users: int = 2, max_queue: int = 4, names: tuple[str, ...] = (MODEL,), **settings: Any
) -> ServerSettings:
    """Settings of a server with numpy models; `limits` is a dict."""
    limits = Limits(**settings.pop("limits", {}))
    engine = EngineConfig(users, SEQ_LENGTH, max_queue=max_queue)
    models = tuple(ModelSettings(name, FOLDER, engine) for name in names)
    return ServerSettings(
        models, limits, **{"warm_up": ("ab",), "drain_seconds": PATIENCE, **settings}
    )


class InProcessServer:
    """A running server, whose behaviour does not depend on the machine's load.

    Attributes:
        url: its address.
        service: shared by its protocols; access it only through `call`.
    """

    def __init__(self, life: ServerLifecycle, loop: asyncio.AbstractEventLoop) -> None:
        self.life = life
        self.url = life.url
        self.service: Service = life.service
        self.loop = loop

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the server's event loop and returns its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def llm(self, name: str = MODEL) -> MultiUserLLM:
        return self.service.models.get(name).llm

    def wait_until_running(self, count: int) -> None:
        """Waits until `count` requests are running."""
        wait_until(lambda: self.service.running == count)

    def end(self) -> None:
        """Requests a graceful shutdown."""
        self.loop.call_soon_threadsafe(self.life.request_stop)


@contextmanager
def in_process_server(
    settings: Optional[ServerSettings] = None,
    open_llm: Callable[..., MultiUserLLM] = mock_llm,
    ready: bool = True,
) -> Iterator[InProcessServer]:
    """A server in a thread; stopped at the end of the block, which raises its errors."""
    settings = settings or mock_settings()
    begun: Future[InProcessServer] = Future()

    async def live() -> None:
        life = ServerLifecycle(settings, listen("127.0.0.1", 0), open_llm)
        life._uvicorn.config.timeout_graceful_shutdown = int(PATIENCE)
        begun.set_result(InProcessServer(life, asyncio.get_running_loop()))
        await life.run()

    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(live()))
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="server", daemon=True)
    with ExitStack() as patient:
        # A call of the step API waits while a test holds the engine, and the machine may hold all.
        for name in ("step.WAIT_SECONDS", "http_protocol.HEADER_SECONDS"):
            patient.enter_context(patch(f"glm_multiuser.server.{name}", PATIENCE))
        thread.start()
        server = begun.result(PATIENCE)
        try:
            if ready:
                wait_until(lambda: server.service.state == "ready" or ended.done())
            yield server
        finally:
            if not ended.done():
                server.end()
            thread.join(2 * PATIENCE)
    ended.result(PATIENCE)
