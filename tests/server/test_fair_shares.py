"""A key that floods the server neither starves nor delays other keys; with mocks."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.engine.request import Request
from glm_multiuser.server.app import create_app
from glm_multiuser.server.service import LONG_PROMPT
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.structured.grammar import Grammar
from glm_multiuser.structured.matcher import GrammarMatcher
from tests.engine.mock_runner import Call, MockRunner
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    BLUE,
    KEYS,
    RED,
    answer_alone,
    in_background,
    long_prompts,
    nothing_stays,
    post,
    step,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)
from tests.structured.random_model import chatglm3_llm

pytestmark = pytest.mark.slow

ATTACKERS = 256
"""Maximum concurrent requests per key."""
REQUESTS = 5
STEPS_OF_A_SECOND = 100
"""Of a model that needs 10 ms for a step."""
WAITING = 60
"""Requests of a flood that wait all the time."""


def served(server: InProcessServer) -> list[Request]:
    """The requests that got a slot, in order, without those of the warm-up."""
    runner: Any = server.llm()._runner
    assert isinstance(runner, MockRunner)
    return [request for request in runner.requests_of("prefill") if request.group]


@pytest.mark.parametrize("users", [1, 4])
def test_the_first_token_comes_two_answers_later_than_alone_at_most(users: int) -> None:
    (prompt,) = long_prompts(1)
    capacity = users + 8
    settings = mock_settings(users=users, max_queue=8, keys=KEYS)
    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps() as steps:
            flood = [
                in_background(post, server, "/", {"prompt": prompt}, **RED)
                for _ in range(2 * capacity)
            ]
            wait_until(lambda: sum(one.done() for one in flood) == capacity)
            while len(served(server)) < users:
                steps.step()
            late = in_background(post, server, "/", {"prompt": "ab"}, **BLUE)
            wait_until(lambda: late.done() or server.service.running == capacity + 1)
            while served(server)[-1].group != "blue":
                steps.step()
            # A request in between took the slot of one answer, and blue that of another.
            assert len(served(server)) - users <= 2
        assert late.result(PATIENCE).json()["response"] == answer_alone("ab")
        statuses = [one.result(PATIENCE).status_code for one in flood]
        assert (statuses.count(200), statuses.count(429)) == (capacity, capacity)


@pytest.mark.parametrize("honors_retry_after", [True, False])
def test_a_flood_of_one_key_makes_another_wait_for_less_than_a_second(
    honors_retry_after: bool,
) -> None:
    opened: list[MultiUserLLM] = []
    flooded = threading.Event()
    began: list[float] = []
    """When each step did."""

    def before(call: Call) -> None:
        # A step is slower than HTTP, as those of models are: who was answered asks again meanwhile.
        if flooded.is_set():
            wait_until(lambda: opened[0].stats().waiting >= WAITING or not flooded.is_set())
        began.append(time.monotonic())

    def slow_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        opened.append(mock_llm(settings, before=before, **options))
        return opened[0]

    settings = mock_settings(users=8, max_queue=64, keys=KEYS)
    body = {"prompt": long_prompts(1)[0], "max_tokens": 24}
    with in_process_server(settings, slow_llm) as server, flood(server, body, honors_retry_after):
        try:
            wait_until(lambda: opened[0].stats().waiting >= WAITING)
            flooded.set()
            for _ in range(REQUESTS):
                response = post(server, "/", {"prompt": "ab"}, **BLUE)
                assert response.json()["response"] == answer_alone("ab")
        finally:
            flooded.clear()
        blue = [one for one in served(server) if one.group == "blue"]
    assert len(blue) == REQUESTS
    for one in blue:
        entered = one._submitted + one.queued_seconds
        waited = sum(one._submitted <= begin <= entered for begin in began)
        assert waited < STEPS_OF_A_SECOND


def test_a_flood_that_ignores_retry_after_delays_another_key_by_few_rejections() -> None:
    capacity = 8 + 64
    body = {"prompt": long_prompts(1)[0]}
    settings = mock_settings(users=8, max_queue=64, keys=KEYS)
    before_it: Future[int] = Future()
    """Rejections of the flood while the other key's request was on its way to the queue."""

    async def ask_in_a_flood(server: InProcessServer) -> httpx.Response:
        """On the server's event loop, so no network and no thread has a say in the order."""
        rejections = 0

        async def resend(client: httpx.AsyncClient) -> None:
            nonlocal rejections
            while (await client.post("/", json=body, headers=RED)).status_code == 429:
                rejections += 1
                if before_it.done():
                    break

        transport = httpx.ASGITransport(create_app(server.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            flood = [asyncio.ensure_future(resend(client)) for _ in range(ATTACKERS)]
            while rejections < ATTACKERS:
                await asyncio.sleep(0)
            earlier = rejections
            one = asyncio.ensure_future(client.post("/", json={"prompt": "ab"}, headers=BLUE))
            while server.service.running == capacity:
                await asyncio.sleep(0)
            before_it.set_result(rejections - earlier)
            await asyncio.gather(*flood)
            return await one

    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps():
            asked = asyncio.run_coroutine_threadsafe(ask_in_a_flood(server), server.loop)
            assert before_it.result(PATIENCE) < ATTACKERS / 16
        assert asked.result(PATIENCE).json()["response"] == answer_alone("ab")


@contextmanager
def held_compiler(server: InProcessServer) -> Iterator[list[str]]:
    """Inside the block no grammar is compiled. -> the choices in the order of their turns."""
    llm: Any = server.llm()
    compiled: list[str] = []
    go_on = threading.Event()

    def compile_grammar(grammar: Grammar, **options: Any) -> GrammarMatcher:
        compiled.append(grammar.value[0])
        assert go_on.wait(PATIENCE)
        return MultiUserLLM.compile_grammar(llm, grammar, **options)

    llm.compile_grammar = compile_grammar
    try:
        yield compiled
    finally:
        go_on.set()


def choose(server: InProcessServer, word: str, **headers: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "q"}], "guided_choice": [word]}
    return post(server, "/v1/chat/completions", body, **headers)


def test_grammars_of_one_key_make_neither_others_nor_long_prompts_wait() -> None:
    settings = mock_settings(users=2, max_queue=64, keys=KEYS)
    with in_process_server(settings, chatglm3_llm) as server, nothing_stays(server):
        with held_compiler(server) as compiled:
            words = [f"red{number}" for number in range(40)]  # more than asyncio has threads
            asked = [in_background(choose, server, word, **RED) for word in words]
            wait_until(lambda: server.service.admission.in_flight == len(words) and compiled)
            long_prompt = {"prompt": "word " * LONG_PROMPT}
            assert post(server, "/tokenize", long_prompt, **BLUE).status_code == 200
            asked.append(in_background(choose, server, "blue", **BLUE))
            wait_until(lambda: server.service.admission.in_flight == len(words) + 1)
            late = choose(server, "late", x_request_timeout="0.01", **BLUE)
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert {one.result(PATIENCE).status_code for one in asked} == {200}
        assert compiled.index("blue") == 1
        assert sorted(compiled) == sorted([*words, "blue"])


def test_no_grammar_is_compiled_for_a_full_queue() -> None:
    settings = mock_settings(users=1, max_queue=2)
    with in_process_server(settings, chatglm3_llm) as server, nothing_stays(server):
        with held_compiler(server) as compiled:
            asked = [in_background(choose, server, "a") for _ in range(3)]
            wait_until(lambda: server.service.admission.in_flight == 3)
            assert_full(choose(server, "b"), "3 grammars are waiting to be compiled")
        assert {one.result(PATIENCE).status_code for one in asked} == {200}
        body = {"prompt": "q", "max_tokens": 1}
        with SingleSteps(), held_compiler(server) as compiled:
            asked = [in_background(post, server, "/", body) for _ in range(3)]
            server.wait_until_running(3)
            assert_full(choose(server, "b"), "3 requests are waiting")
            assert compiled == []
        assert {one.result(PATIENCE).status_code for one in asked} == {200}


def test_a_server_that_ends_waits_for_grammars_to_be_compiled() -> None:
    aborted: list[int] = []
    with in_process_server(mock_settings(), chatglm3_llm) as server:
        service: Any = server.service
        service.abort_all = lambda error: aborted.append(service.admission.in_flight)
        with held_compiler(server) as compiled:
            asked = in_background(choose, server, "a")
            wait_until(lambda: compiled)
            server.end()
            wait_until(lambda: service.state == "draining")
        assert asked.result(PATIENCE).status_code == 200
    assert aborted == [0]


def test_no_grammar_is_compiled_for_the_full_share_of_a_key() -> None:
    settings = mock_settings(users=1, max_queue=2, keys=KEYS)
    with in_process_server(settings, chatglm3_llm) as server, nothing_stays(server):
        body = {"prompt": "q", "max_tokens": 1}
        with SingleSteps(), held_compiler(server) as compiled:
            asked = [in_background(post, server, "/", body, **RED) for _ in range(3)]
            server.wait_until_running(3)
            asked.append(in_background(choose, server, "blue", **BLUE))
            wait_until(lambda: compiled == ["blue"])  # it may still have its share
            assert_full(choose(server, "red", **RED), "3 requests are waiting")
            assert compiled == ["blue"]
        assert {one.result(PATIENCE).status_code for one in asked} == {200}


def assert_full(response: httpx.Response, why: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (429, "queue_full")
    assert error["message"] == f"{why}; max_queue is 2"


@contextmanager
def flood(
    server: InProcessServer, body: dict[str, Any], honors_retry_after: bool
) -> Iterator[None]:
    """Inside the block one key asks again and again, on so many connections."""
    address = urlsplit(server.url)
    content = json.dumps(body).encode()
    head = f"POST / HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(content)}\r\n"
    request = f"{head}Authorization: {RED['authorization']}\r\n\r\n".encode() + content
    over = threading.Event()

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
            headers = dict(line.split(": ") for line in answer.strip().split("\r\n")[1:])
            await reader.readexactly(int(headers["content-length"]))
            if honors_retry_after:
                await asyncio.sleep(float(headers.get("retry-after", 0)))

    async def attack_all() -> None:
        connections = [
            await asyncio.open_connection(address.hostname, address.port) for _ in range(ATTACKERS)
        ]
        attacks = [asyncio.ensure_future(attack(*one)) for one in connections]
        await asyncio.to_thread(over.wait)
        for one in attacks:
            one.cancel()
        ended = await asyncio.gather(*attacks, return_exceptions=True)
        for _, writer in connections:
            writer.close()
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended

    attacking = in_background(asyncio.run, attack_all())
    try:
        yield
    finally:
        over.set()
        attacking.result(PATIENCE)


def test_a_key_that_opens_all_generations_of_the_step_api_locks_nobody_out() -> None:
    limits = {"step_entries": 4, "step_seconds": 0.01}
    settings = mock_settings(max_queue=64, keys=KEYS, limits=limits)
    with in_process_server(settings) as server, nothing_stays(server), SingleSteps():
        for key, count in ((RED, 4), (BLUE, 2)):
            for number in range(count):
                running = server.service.running
                in_background(step_of, server, key, f"id {number}")
                server.wait_until_running(running + 1)
            refused = step_of(server, key, "one more")
            assert refused.status_code == 429
            assert refused.json()["code"] == "too_many_generations"
            assert "step_entries is 4" in refused.json()["error"]


def step_of(server: InProcessServer, key: dict[str, str], cache_id: str) -> Any:
    return post(server, "/llm/generate", {"cache_id": cache_id, "query": "question 0"}, **key)


def test_without_keys_everybody_is_in_one_group() -> None:
    settings = mock_settings(users=1, max_queue=1, limits={"step_seconds": 0.01})
    with in_process_server(settings) as server, nothing_stays(server), SingleSteps():
        asked = [in_background(step, server, f"id {number}", "ab") for number in range(2)]
        server.wait_until_running(2)
        for session in ("a", "b"):
            response = post(server, "/", {"prompt": "ab"}, x_session_id=session)
            assert response.status_code == 429
            assert response.json()["code"] == "queue_full"
    assert [one.result(PATIENCE).status_code for one in asked] == [200, 200]
