"""Helpers to query a server, to disconnect mid-request, and to check for leaks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, Callable, Optional, TypeVar
from urllib.parse import urlsplit

import httpx

from glm_multiuser import MultiUserLLM
from glm_multiuser.server.settings import ModelSettings
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.driving import alone
from tests.engine.mock_runner import EOS, FAILS_LATER
from tests.server.in_process import PATIENCE, InProcessServer, mock_llm, wait_until

Result = TypeVar("Result")

ANSWER_TOKENS = 64
"""Maximum tokens of an answer of `mock_llm`."""
FAILS = "\x00"
"""A prompt with this character gets NaN in the middle of its answer; see `FailingTokenizer`."""

KEYS = {"red": "red-key-0123456789", "blue": "blue-key-0123456789"}
RED, BLUE = ({"authorization": f"Bearer {key}"} for key in KEYS.values())

HTTP = httpx.Client(
    timeout=PATIENCE, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
)
"""A client without keep-alive connections."""


class FailingTokenizer(FakeTokenizer):
    """Can encode the token that makes the model's logits NaN."""

    def encode(self, text: str) -> list[int]:
        plain = super().encode(text)
        return [FAILS_LATER if one == FAILS else token for one, token in zip(text, plain)]


def llm_that_fails(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    """`mock_llm` whose answer to `FAILS` fails."""
    llm = mock_llm(settings, **options)
    llm.tokenizer = FailingTokenizer()
    return llm


def tokens_alone(prompt: str, history: Sequence[Any] = ()) -> list[int]:
    """A mock's tokens without concurrent requests."""
    prompt_ids = FakeTokenizer().encode_prompt(prompt, history)
    return alone(prompt_ids, temperature=0.0, max_tokens=ANSWER_TOKENS).token_ids


@cache
def answer_alone(prompt: str) -> str:
    """A mock's answer without concurrent requests."""
    return FakeTokenizer().decode([token for token in tokens_alone(prompt) if token != EOS])


@cache
def long_prompts(count: int) -> list[str]:
    """Prompts with answers of maximum length."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        prompt = f"question {number}"
        if len(tokens_alone(prompt)) == ANSWER_TOKENS:
            found.append(prompt)
        number += 1
    return found


def post(server: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    """Posts JSON and waits for the whole response; header names have `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(server.url + path, json=body, headers=named)


def ask(server: Any, prompt: str, **fields: Any) -> httpx.Response:
    """Calls the simple API."""
    return post(server, "/", {"prompt": prompt, **fields})


def step(server: Any, cache_id: str, query: str = "", **fields: Any) -> httpx.Response:
    """One call of the step API."""
    return post(server, "/llm/generate", {"cache_id": cache_id, "query": query, **fields})


def step_to_end(server: Any, cache_id: str, query: str = "", **fields: Any) -> str:
    """The whole text of one generation of the step API."""
    text, flag = "", ""
    while flag != "end":
        answer = step(server, cache_id, query, **fields).json()
        text, flag = text + answer["delta_text"], answer["flag"]
    return text


def get(server: Any, path: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.get(server.url + path, headers=named)


def events_of(text: str) -> list[dict[str, Any]]:
    """Parses the JSON events of a stream."""
    lines = [line[len("data: ") :] for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def streamed_text(text: str) -> str:
    """The joined deltas of a simple API stream."""
    return "".join(event["delta"] for event in events_of(text))


def in_background(function: Callable[..., Result], *args: Any, **options: Any) -> Future[Result]:
    """Calls a function in its own thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Wire:
    """A raw connection controlled by the test.

    Args:
        url: of the server.
        receive_buffer: size of the kernel's receive buffer in bytes.
    """

    def __init__(self, url: str, receive_buffer: Optional[int] = None) -> None:
        address = urlsplit(url)
        self.host = address.netloc
        self._socket = socket.socket()
        self._socket.settimeout(PATIENCE)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect((address.hostname, address.port))
        self.received = b""

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def request(self, path: str, body: Any, method: str = "POST", **headers: str) -> Wire:
        """Sends a request with a JSON body."""
        content = json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(content)}", "", ""]
        self.send("\r\n".join(lines).encode() + content)
        return self

    def read(self, size: int = 65536) -> bytes:
        """Reads at most `size` bytes; empty at the end."""
        content = self._socket.recv(size)
        self.received += content
        return content

    def read_until(self, mark: bytes) -> bytes:
        """Reads until `mark` is received; returns everything so far."""
        while mark not in self.received:
            assert self.read(), f"the connection ended before {mark!r}: {self.received!r}"
        return self.received

    def read_to_end(self) -> bytes:
        """Reads until the server closes the connection; returns everything."""
        try:
            while self.read():
                pass
        except ConnectionResetError:
            pass
        return self.received

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        """Closes the connection with RST instead of FIN."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


def open_files(pid: Optional[int] = None) -> int:
    """Number of open file descriptors; None: of this process."""
    return len(os.listdir(f"/proc/{pid or 'self'}/fd"))


LASTING_TASKS = {"_shutdown_watcher", "InProcessServer.call.<locals>.run"}
"""The first watches for shutdown from the first stream on; the other is the caller itself."""


def tasks_of(server: InProcessServer) -> list[str]:
    """Names of the tasks on the server's event loop."""

    def names() -> list[str]:
        return sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore

    return [name for name in server.call(names) if name not in LASTING_TASKS]


def is_idle(server: InProcessServer) -> bool:
    """Whether all counters of the service are zero, checked on its event loop."""
    service = server.service

    def idle() -> bool:
        entries = service.metrics.registry.get_sample_value("glm_step_entries")
        users = service.admission._by_user
        return not (service.running or service.admission.in_flight or users or entries)

    return bool(server.call(idle))


def is_quiet(server: InProcessServer) -> bool:
    """Whether the server is idle and has also finished the log lines of sent responses."""
    return is_idle(server) and not any("run_asgi" in name for name in tasks_of(server))


def errors_of(server: InProcessServer) -> list[Any]:
    """The abort error of each running request; None if it was not aborted."""
    running = server.service._running
    # On the event loop: other threads could observe a partial abort.
    return list(server.call(lambda: [one._error for one, _ in running.values()]))


@contextmanager
def nothing_stays(server: InProcessServer) -> Iterator[None]:
    """Checks that its block leaves no request, task or open file behind."""
    wait_until(lambda: is_quiet(server))
    tasks, files = tasks_of(server), open_files()

    def new_tasks() -> Counter[str]:
        # Fewer is no failure: one that comes and goes each second may have been there before.
        return Counter(tasks_of(server)) - Counter(tasks)

    yield
    wait_until(lambda: is_idle(server))
    try:
        wait_until(lambda: not new_tasks() and open_files() <= files)
    except AssertionError:
        assert (new_tasks(), open_files()) == (Counter(), files), "something stays"
