"""Two replicas behind their ingress as a process, and what tests ask of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Callable, Optional

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from glm_multiuser import MultiUserLLM, SamplingParams
from tests.server.asking import events_of
from tests.server.in_process import wait_until
from tests.server.process import START_SECONDS, ServerProcess

MODEL = "chatglm3-tiny"
REPLICAS, USERS, QUEUE = 2, 8, 2
SEQ_LENGTH = 512
ARGUMENTS = (
    *("--replicas", str(REPLICAS), "--checkpoint", f"ckpt/{MODEL}"),
    *("--users", str(USERS), "--max-queue", str(QUEUE), "--seq-length", str(SEQ_LENGTH)),
)
LONG = 300
"""Tokens of an answer that is still running when something happens."""
TIMEOUT = 120.0
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class Replicas(ServerProcess):
    """`glm-multiuser serve --replicas 2`, which does not wait until it is ready."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*ARGUMENTS, *arguments, ready=False)
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT, trust_env=False, limits=LIMITS)

    def pids(self) -> dict[str, int]:
        """Process of every replica that has ever been ready."""
        said = [line[line.index("{") :] for line in self.lines if '"replica ready"' in line]
        return {one["replica"]: one["pid"] for one in map(json.loads, said)}

    def status(self) -> dict[str, Any]:
        said: dict[str, Any] = self.http.get("/status").raise_for_status().json()
        return said

    def users(self, count: int = 4) -> list[str]:
        """Names of users, so many of each replica in turn: hashing puts them by chance."""
        places: dict[str, list[str]] = {name: [] for name in self.status()["replicas"]}
        for number in itertools.count():
            if min(map(len, places.values())) >= count:
                return [user for users in zip(*places.values()) for user in users][: 2 * count]
            user = f"user {number}"
            places[self.ask("where", 1, user=user).headers["x-replica"]].append(user)
        raise AssertionError("unreachable")

    def wait_for_all(self) -> None:
        """Returns when two replicas answer, and the log has their processes."""

        def all_there() -> bool:
            names = self.status()["replicas"]
            return len(names) == REPLICAS and self.pids().keys() >= set(names)

        wait_until(all_there, START_SECONDS)

    def metrics(self) -> dict[str, Metric]:
        """By name."""
        text = self.http.get("/metrics").raise_for_status().text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def sent_again(self) -> float:
        """Requests that the ingress has sent to another replica."""
        samples = self.metrics()["glm_ingress_retries"].samples
        return sum(sample.value for sample in samples if sample.name.endswith("_total"))

    def working(self) -> int:
        """Requests that run or wait."""
        status = self.status()
        running = [slot for slot in status["slots"] if slot["state"] not in ("free", "idle")]
        return len(running) + int(status["queue"]["waiting"])

    def wait_until_idle(self) -> None:
        """Returns when no slot is at work, and nothing waits."""
        wait_until(lambda: not self.working())

    def update(self, count: int) -> Callable[[], dict[str, Any]]:
        """Asks for other replicas; what it returns waits until they are there."""
        self.signal(signal.SIGHUP)
        return lambda: self.wait_for("ready", count)

    def ask(self, prompt: str, tokens: int = 8, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body_of(prompt, tokens, **fields))

    @contextlib.contextmanager
    def stream(self, prompt: str, tokens: int = LONG, **fields: Any) -> Iterator[Stream]:
        """A stream whose first text has come."""
        body = body_of(prompt, tokens, stream=True, **fields)
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            stream = Stream(response.headers["x-replica"], lines)
            while not stream.text:
                stream.read_one()
            yield stream


@dataclass
class Stream:
    """What has come of a streamed answer."""

    replica: str
    lines: Iterator[str]
    text: str = ""
    error: Optional[dict[str, Any]] = None
    done: bool = field(default=False)

    def read_one(self) -> None:
        line = next(self.lines)
        self.done = self.done or line == "data: [DONE]"
        for event in events_of(line):
            self.error = event.get("error", self.error)
            for choice in event.get("choices", ()):
                self.text += choice["text"]

    def read(self) -> Stream:
        """To the end, however it comes."""
        with contextlib.suppress(StopIteration):
            while True:
                self.read_one()
        return self


def body_of(prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """Greedy, of a fixed length."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def text_of(answer: httpx.Response) -> str:
    """Of a whole completion."""
    text: str = answer.json()["choices"][0]["text"]
    return text


def together(count: int, one: Callable[[int], Any]) -> list[Any]:
    """Calls it for 0, 1, ... at the same time. Its threads are in this thread's network."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class Alone:
    """The library with one user: what every answer has to be."""

    def __init__(self) -> None:
        self.llm = MultiUserLLM.from_pretrained(f"ckpt/{MODEL}", users=1, seq_length=SEQ_LENGTH)
        self.answer = cache(self._answer)

    def _answer(self, prompt: str, tokens: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (result,) = self.llm.generate([prompt], params)
        return result.text
