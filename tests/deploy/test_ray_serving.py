"""Two replicas of the real model behind one ingress, by real clients, in a network of their own."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest

from tests.deploy.own_network import own_network
from tests.deploy.replicas import (
    LONG,
    MODEL,
    QUEUE,
    REPLICAS,
    USERS,
    Alone,
    Replicas,
    Stream,
    body_of,
    text_of,
    together,
)
from tests.server.in_process import PATIENCE, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="several replicas need the extra [ray]"),
]

TURNS = 4
ATTEMPTS = 10
PROMPTS = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with own_network():
        yield


@pytest.fixture(scope="module")
def server(network: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with Replicas("--session-dir", str(tmp_path_factory.mktemp("sessions"))) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def alone(server: Replicas) -> Iterator[Alone]:
    """It loads while the replicas do."""
    alone = Alone()
    with alone.llm:
        server.wait_for("ready")
        server.wait_for_all()
        yield alone


@pytest.fixture(autouse=True)
def all_idle(server: Replicas, alone: Alone) -> Iterator[None]:
    yield
    if server.process.poll() is None:
        server.wait_until_idle()


def test_a_session_stays_where_its_cache_is(server: Replicas) -> None:
    http: Any = server.http  # some versions of the client are typed for httpx2 alone
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)

    users = server.users()

    def talk(number: int) -> tuple[set[str], list[int]]:
        messages: list[Any] = []
        places, cached = set(), []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{number}, {turn}"})
            raw = client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, user=users[number], max_tokens=6, temperature=0
            )
            said = raw.parse()
            messages.append({"role": "assistant", "content": said.choices[0].message.content})
            places.add(raw.headers["x-replica"])
            assert said.usage is not None
            assert said.usage.prompt_tokens_details is not None
            cached.append(said.usage.prompt_tokens_details.cached_tokens or 0)
        return places, cached

    talks = together(len(users), talk)
    for places, cached in talks:
        assert len(places) == 1
        assert cached == sorted(set(cached)), "every turn reuses more than the one before"
    assert set.union(*(places for places, _ in talks)) == set(server.status()["replicas"])


def test_replicas_have_the_priority_of_the_command(server: Replicas) -> None:
    own = os.getpriority(os.PRIO_PROCESS, server.pid)
    pids = server.pids()
    assert len(pids) == REPLICAS
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids.values()} == {own}


def test_a_session_may_be_named_in_latin_1(server: Replicas) -> None:
    headers = {b"x-session-id": "caf\u00e9".encode("latin-1")}
    answer = server.http.post("/v1/completions", json=body_of("a", 2), headers=headers)
    assert answer.status_code == 200, answer.text


def test_every_protocol_finds_the_same_replica(server: Replicas) -> None:
    inside = {"prompt": "a", "parameters": {"sequence_id": "s", "max_tokens": 2}}
    header = {"x-session-id": "s"}
    path = f"/v2/models/{MODEL}/generate"
    answers = [
        server.ask("a", 2, user="s"),
        server.http.post(path, json=inside),
        server.http.post(path, json={"prompt": "a", "max_token": 2}, headers=header),
        server.http.post("/", json={"prompt": "a", "max_tokens": 2}, headers=header),
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-replica"] for answer in answers}) == 1


def test_metrics_and_status_are_those_of_both(server: Replicas) -> None:
    together(8, lambda number: server.ask("a", 2, user=f"user {number}").raise_for_status())
    names = set(server.status()["replicas"])
    families = server.metrics()
    for name in ("glm_users", "glm_generated_tokens", "glm_step_seconds"):
        assert {sample.labels["replica"] for sample in families[name].samples} == names
    assert sum(sample.value for sample in families["glm_users"].samples) == REPLICAS * USERS
    assert families["glm_ingress_responses"].samples
    assert len(server.status()["slots"]) == REPLICAS * USERS


def test_when_all_are_full_the_ingress_rejects_in_our_shape(server: Replicas, alone: Alone) -> None:
    places = REPLICAS * (USERS + QUEUE)

    def ask(number: int) -> Any:
        return server.ask(PROMPTS[number % 4], LONG)

    for _ in range(ATTEMPTS):
        answers = together(places + 8, ask)
        taken = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(taken) >= places, "a place was free"
        for answer in refused:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert text_of(answer) == alone.answer(PROMPTS[number % 4], LONG)
        if refused:  # else the first ones had been answered when the last ones asked
            return
    raise AssertionError("nothing was refused")


def test_a_client_that_goes_away_frees_its_slot(server: Replicas) -> None:
    with server.stream("away") as stream:
        assert not stream.done
    server.wait_until_idle()


def test_a_killed_replica_harms_nobody_else(server: Replicas, alone: Alone) -> None:
    users = server.users(2 * len(PROMPTS))  # of both replicas in turn
    before = server.sent_again()
    killed = server.ask("where", 1, user=users[0]).headers["x-replica"]
    begun: queue.SimpleQueue[Stream] = queue.SimpleQueue()

    def stream(number: int) -> Stream:
        with server.stream(PROMPTS[number % 4], user=users[number]) as stream:
            begun.put(stream)
            return stream.read()

    def whole(number: int) -> httpx.Response:
        # Of the replica that will be killed.
        return server.ask(PROMPTS[number], LONG, user=users[8 + 2 * number])

    with ThreadPoolExecutor(12) as pool:
        # The other replica has room for these, and for the streams that have not begun.
        answers = [pool.submit(whole, number) for number in range(3)]
        streams = [pool.submit(stream, number) for number in range(8)]
        # Ray sends some to the other one, while this one is slow to say how busy it is.
        while begun.get(timeout=PATIENCE).replica != killed:
            pass
        os.kill(server.pids()[killed], signal.SIGKILL)
    for number, streamed in enumerate(streams):
        found, expected = streamed.result(), alone.answer(PROMPTS[number % 4], LONG)
        if found.done:
            assert (found.text, found.error) == (expected, None)
        else:
            assert found.error is not None, "a stream was cut without a word"
            assert found.error["code"] == "replica_ended"
            assert found.replica == killed
            assert expected.startswith(found.text)
    assert not all(streamed.result().done for streamed in streams)
    for number, answered in enumerate(answers):
        assert answered.result().status_code == 200, answered.result().text
        assert text_of(answered.result()) == alone.answer(PROMPTS[number], LONG)
    assert server.sent_again() > before
    server.wait_for_all()
    assert killed not in server.status()["replicas"]


def cached_tokens(answer: httpx.Response) -> int:
    held: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return held


def saved(server: Replicas) -> float:
    """Sessions that were copied out of slots."""
    samples = server.metrics()["glm_sessions_saved"].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def test_a_session_follows_its_user_to_another_replica(server: Replicas, alone: Alone) -> None:
    server.wait_for_all()
    wait_until(lambda: not server.status()["sessions"]["in_memory"])
    before = saved(server)
    first = server.ask("one", LONG, user="traveller")
    assert cached_tokens(first) == 0
    killed = first.headers["x-replica"]
    # It is written behind: copied out of the slot after the answer, then to the disk.
    wait_until(lambda: saved(server) > before)
    wait_until(lambda: not server.status()["sessions"]["in_memory"])
    os.kill(server.pids()[killed], signal.SIGKILL)
    server.wait_for_all()
    again = server.ask("one", LONG, user="traveller")
    assert again.headers["x-replica"] != killed
    assert cached_tokens(again) > 0
    assert text_of(again) == text_of(first) == alone.answer("one", LONG)
    assert server.http.delete("/v1/sessions/traveller").json()["deleted"]
    assert cached_tokens(server.ask("one", 2, user="traveller")) == 0


@pytest.mark.rare
def test_other_replicas_without_a_failed_request(server: Replicas, alone: Alone) -> None:
    before = set(server.status()["replicas"])
    session = server.ask("two", LONG, user="who stays")
    wait = server.update(count=2)
    updated = threading.Event()
    asked: list[tuple[str, httpx.Response]] = []

    def ask_on(number: int) -> None:
        while not updated.is_set():
            prompt = PROMPTS[len(asked) % 4]
            asked.append((prompt, server.ask(prompt, LONG, user=f"user {number}")))

    threads = [threading.Thread(target=ask_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait()
    finally:
        updated.set()
        for thread in threads:
            thread.join()
    assert asked
    for prompt, answer in asked:
        assert answer.status_code == 200, answer.text
        assert text_of(answer) == alone.answer(prompt, LONG)
    assert before.isdisjoint(server.status()["replicas"])
    later = server.ask("two", LONG, user="who stays")
    assert cached_tokens(later) > 0
    assert text_of(later) == text_of(session)


def test_it_finishes_what_runs_and_ends_by_itself_when_asked(
    server: Replicas, alone: Alone
) -> None:
    pids = server.pids()
    alive = [pids[name] for name in server.status()["replicas"]]
    expected = {prompt: alone.answer(prompt, LONG) for prompt in PROMPTS}
    begun = threading.Barrier(len(PROMPTS) + 1)

    def ask(number: int) -> Stream:
        with server.stream(PROMPTS[number]) as stream:
            begun.wait(PATIENCE)
            return stream.read()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asking = [pool.submit(ask, number) for number in range(len(PROMPTS))]
        begun.wait(PATIENCE)
        server.signal(signal.SIGTERM)
        streams = [one.result() for one in asking]
    for prompt, stream in zip(PROMPTS, streams):
        assert (stream.error, stream.done, stream.text) == (None, True, expected[prompt])
    assert server.wait() == 0
    for pid in alive:
        wait_until(partial(has_ended, pid))


def has_ended(pid: int) -> bool:
    """What is killed takes a moment."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
