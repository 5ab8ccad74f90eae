"""The library's guarantee over HTTP: identical answers alone and under load.

The real command with eight slots, sixteen clients with random arrivals, lengths, seeds and
sessions, all protocols mixed, three in ten clients disconnecting midway. Every finished answer must
equal that of the same request alone, and no resources may leak.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.http_asks import CAN_BE_LEFT, PATIENCE, PROTOCOLS, Ask, Clients, Heard
from tests.server.in_process import wait_until
from tests.server.process import ROOT, ServerProcess

CLIENTS, SLOTS, ASKS = 16, 8, 80
LEAVING = 0.3
LONGEST_PAUSE = 0.05
"""Seconds that a client may think before its next request."""
MEMORY_GROWTH = 1.02

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_p": 0.8},
)


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    arguments = ("--users", str(SLOTS), "--seq-length", "256", "--step-expiry", "20")
    with ServerProcess(*arguments, "--requests-per-user", str(CLIENTS)) as process:
        yield process


def asks() -> list[Ask]:
    chance = random.Random(5)
    corpus = (ROOT / "examples/train_glm_tiny/corpus.jsonl").read_text(encoding="utf-8")
    questions = [json.loads(line)["rounds"][0][0] for line in corpus.splitlines()]
    made = []
    for number in range(ASKS):
        protocol = list(PROTOCOLS)[number % len(PROTOCOLS)]
        history = tuple((text, text * 2) for text in chance.sample(questions, number % 3))
        session = chance.choice([None, *(f"session {name}" for name in range(9))])
        sampling = {
            **chance.choice(SAMPLING),
            "max_tokens": chance.randrange(4, 40),
            "seed": chance.randrange(2**31),
        }
        made.append(Ask(protocol, chance.choice(questions), history, session, sampling))
    return made


def some_leave(everybody: Sequence[Ask], seed: int) -> list[Ask]:
    """The same requests in another order, three in ten of which are given up."""
    chance = random.Random(seed)
    able = [number for number, ask in enumerate(everybody) if ask.protocol in CAN_BE_LEFT]
    leaving = set(chance.sample(able, round(LEAVING * len(everybody))))
    mixed = [
        replace(ask, leave_after=chance.randrange(6)) if number in leaving else ask
        for number, ask in enumerate(everybody)
    ]
    return chance.sample(mixed, len(mixed))


def talk(url: str, mine: Sequence[Ask], seed: int, begin: threading.Barrier) -> list[Heard]:
    """One client: its requests one after the other, with pauses."""
    chance, pause = random.Random(seed), threading.Event()
    clients = Clients(url)
    try:
        begin.wait(PATIENCE)
        heard = []
        for ask in mine:
            pause.wait(chance.random() * LONGEST_PAUSE)
            heard.append(clients.ask(ask))
        return heard
    finally:
        clients.close()


def under_load(url: str, everybody: Sequence[Ask], seed: int) -> list[tuple[Ask, Heard]]:
    shares = [everybody[client::CLIENTS] for client in range(CLIENTS)]
    begin = threading.Barrier(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as threads:
        talks = [
            threads.submit(talk, url, share, seed + client, begin)
            for client, share in enumerate(shares)
        ]
        answers = [one.result(PATIENCE) for one in talks]
    return [pair for share, heard in zip(shares, answers) for pair in zip(share, heard)]


def alone(url: str, everybody: Sequence[Ask]) -> dict[Ask, Heard]:
    clients = Clients(url)
    try:
        return {ask: clients.ask(ask) for ask in everybody}
    finally:
        clients.close()


def metrics(url: str) -> dict[str, float]:
    """Sums over all labels, by the name of the sample."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE, trust_env=False).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def nothing_runs(url: str) -> bool:
    now = metrics(url)
    return not (now["glm_active_users"] or now["glm_queue_depth"] or now["glm_step_entries"])


def is_alone(port: int) -> bool:
    """Whether the server has closed every connection."""
    lines = Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]
    fields = [line.split() for line in lines]
    listens, gone = "0A", "0"  # of what waits for its last packets no process has a file any more
    mine = [one for one in fields if int(one[1].rpartition(":")[2], 16) == port]
    return all(one[3] == listens or one[9] == gone for one in mine)


def footprint(pid: int) -> tuple[int, int, int]:
    """Open files, threads, and resident memory in kB."""
    folder = Path("/proc") / str(pid)
    status = (folder / "status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    files = len(list((folder / "fd").iterdir()))
    return files, int(fields["Threads"]), int(fields["VmRSS"].split()[0])


@pytest.mark.slow
def test_the_same_answer_alone_and_under_load_and_nothing_is_left(process: ServerProcess) -> None:
    url, everybody = process.url, asks()
    expected = alone(url, everybody)
    assert len({heard.text for heard in expected.values()}) > ASKS // 3
    under_load(url, some_leave(everybody, seed=1), seed=100)  # fills caches and pools
    wait_until(lambda: nothing_runs(url))
    wait_until(lambda: is_alone(process.port))
    files, threads, memory = footprint(process.pid)

    before = metrics(url)
    answers = under_load(url, some_leave(everybody, seed=2), seed=200)
    wait_until(lambda: nothing_runs(url))

    left = 0
    for ask, heard in answers:
        whole = expected[replace(ask, leave_after=None)]
        if ask.leave_after is None or heard.finish_reason is not None:
            assert heard == whole, ask
        else:
            assert whole.text.startswith(heard.text), ask
            left += 1
    assert left > LEAVING * ASKS / 2
    after = metrics(url)
    assert after["glm_requests_total"] - before["glm_requests_total"] == ASKS
    assert after["glm_batch_rows_sum"] / after["glm_batch_rows_count"] > 1.5
    assert after["glm_compiles_after_ready"] == 0
    assert process.events("request failed") == []
    wait_until(lambda: is_alone(process.port))
    files_now, threads_now, memory_now = footprint(process.pid)
    assert (files_now, threads_now) == (files, threads)
    assert memory_now <= memory * MEMORY_GROWTH
    assert process.stop() == 0
