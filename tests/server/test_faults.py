"""Bad networks, bad clients and NaN affect only their own request."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm_multiuser import MultiUserLLM
from glm_multiuser.server import http_protocol
from glm_multiuser.server.settings import ModelSettings
from glm_multiuser.tokenizers import IncrementalDetokenizer
from tests.api.fake_tokenizer import FakeTokenizer
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    Wire,
    answer_alone,
    ask,
    events_of,
    get,
    in_background,
    llm_that_fails,
    long_prompts,
    nothing_stays,
    open_files,
    post,
    step_to_end,
    streamed_text,
)
from tests.server.faulty_server import MARKER
from tests.server.held_steps import held_steps, server_to_hold
from tests.server.in_process import (
    MODEL,
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)
from tests.server.process import ServerProcess
from tests.server.proxy import ChaosProxy, Fault

pytestmark = pytest.mark.slow

HEADER_BYTES = 60
"""Of a request: somewhere in the middle of its header."""
BODY_BYTES = 215
"""Of a request: somewhere in the middle of its body."""

FAULTS = {
    "delayed": Fault(delay=0.002),
    "byte by byte": Fault(piece=1),
    "request cut in its header": Fault(cut_request=HEADER_BYTES),
    "request reset in its header": Fault(cut_request=HEADER_BYTES, reset=True),
    "request cut in its body": Fault(cut_request=BODY_BYTES),
    "request reset in its body": Fault(cut_request=BODY_BYTES, reset=True),
    "response cut in its header": Fault(cut_response=20),
    "response cut in its body": Fault(cut_response=400),
    "response reset in its body": Fault(cut_response=400, reset=True),
    "response stalled": Fault(stall_response=300),
}

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a response whose length was not known before."""
QUESTION = "你是谁"
"""One that the real model answers."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_bad_network_harms_nobody_else_and_leaves_nothing(fault: Fault, stream: bool) -> None:
    prompts = long_prompts(5)
    with in_process_server(mock_settings(users=2, max_queue=16)) as server, nothing_stays(server):
        with ChaosProxy(server.url, fault) as proxy:
            victims = [in_background(try_to_ask, proxy, one, stream) for one in prompts[:2]]
            streaming = in_background(ask, server, prompts[2], stream=True)
            whole = in_background(ask, server, prompts[3])
            stepping = in_background(step_to_end, server, "an id", prompts[4])
            assert streamed_text(streaming.result(PATIENCE).text) == answer_alone(prompts[2])
            assert whole.result(PATIENCE).json()["response"] == answer_alone(prompts[3])
            assert stepping.result(PATIENCE) == answer_alone(prompts[4])
            if fault.stall_response is None:
                answers = [victim.result(PATIENCE) for victim in victims]
                complete = [answer_alone(prompt) for prompt in prompts[:2]]
                assert answers == (complete if fault.spares_the_answer else [None, None])
        for victim in victims:
            victim.result(PATIENCE)


def try_to_ask(server: Any, prompt: str, stream: bool) -> Any:
    """The answer, or None if it did not arrive as a whole."""
    try:
        response = ask(server, prompt, stream=stream)
    except httpx.TransportError:
        return None
    return streamed_text(response.text) if stream else response.json()["response"]


def test_the_faults_hit_where_they_should() -> None:
    """A request of `ask`, as it goes over the wire."""
    prompt = long_prompts(1)[0]
    request = httpx.Client().build_request(
        "POST", "http://127.0.0.1:12345/", json={"prompt": prompt, "stream": False}
    )
    head = sum(len(name) + len(value) + 4 for name, value in request.headers.raw)
    head += len("POST / HTTP/1.1\r\n") + len("\r\n")
    assert HEADER_BYTES < head < BODY_BYTES < head + len(request.read())


class HugeTokenizer(FakeTokenizer):
    """Whose tokens fill every buffer between the server and a client soon."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id % 26]) * (1 << 18)

    def detokenizer(
        self, *, continued: bool = False, exact: bool = False
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.token_bytes)


def huge_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
    llm = mock_llm(settings, **options)
    llm.tokenizer = HugeTokenizer()
    return llm


def timers(server: InProcessServer, name: str) -> list[Any]:
    """What the event loop is going to call, by the name of the function."""
    scheduled = server.loop._scheduled  # type: ignore[attr-defined]
    named = [one for one in scheduled if getattr(one._callback, "__name__", "") == name]
    return [one for one in named if not one.cancelled()]


def expire(server: InProcessServer, name: str) -> None:
    """Fires the timer now, independently of how slow the machine is."""

    def call_now() -> None:
        for timer in timers(server, name):
            function, arguments = timer._callback, timer._args
            timer.cancel()
            function(*arguments)

    server.call(call_now)


OF_HEADERS, OF_READING = "abort", "_check_reading"
"""What `http_protocol` calls when a header has not come in time, and nothing was read."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_reader_that_stands_still_holds_no_slot_and_is_let_go(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = long_prompts(1)
    with in_process_server(mock_settings(users=1), huge_llm) as server, nothing_stays(server):
        files = open_files()
        reader = Wire(server.url, receive_buffer=4096)
        reader.request("/", {"prompt": prompt, "stream": stream})
        reader.read_until(b"\r\n\r\n")
        # The only slot becomes free for the next one, although the client reads nothing.
        assert ask(server, prompt, max_tokens=4).status_code == 200
        wait_until(lambda: server.call(lambda: timers(server, OF_READING)))
        # Not before: on a busy machine a client that reads 1 MB pauses, too.
        monkeypatch.setattr(http_protocol, "SEND_SECONDS", 0.2)
        expire(server, OF_READING)
        wait_until(lambda: server.service.running == 0)
        wait_until(lambda: open_files() == files + 1)  # of the connection only this end is left
        with contextlib.suppress(ConnectionResetError):
            while reader.read():
                pass
        assert b'"finish_reason"' not in reader.received
        reader.close()


def test_a_slow_reader_gets_everything_and_slows_nobody() -> None:
    prompts = long_prompts(2)
    with in_process_server(mock_settings(users=1)) as server, nothing_stays(server):
        reader = Wire(server.url, receive_buffer=2048)
        reader.request("/", {"prompt": prompts[0], "stream": True})
        for _ in range(300):
            reader.read(1)
            if len(reader.received) == 150:
                answer = ask(server, prompts[1]).json()
                assert answer["response"] == answer_alone(prompts[1])
        while not reader.received.endswith(LAST_CHUNK):
            assert reader.read(7)
        text = reader.received.partition(b"\r\n\r\n")[2].decode()
        lines = [line for line in text.split("\r\n") if line.startswith("data: ")]
        assert streamed_text("\n".join(lines)) == answer_alone(prompts[0])
        reader.close()


@pytest.mark.parametrize("beginning", [b"", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-"])
def test_a_connection_that_asks_for_nothing_is_closed(beginning: bytes) -> None:
    with in_process_server() as server, nothing_stays(server):
        wires = [Wire(server.url) for _ in range(20)]
        for wire in wires:
            wire.send(beginning)
        assert ask(server, "ab").json()["response"] == answer_alone("ab")
        wait_until(lambda: server.call(lambda: len(timers(server, OF_HEADERS))) == len(wires))
        expire(server, OF_HEADERS)
        for wire in wires:
            wire.read_to_end()
            assert wire.received == b""
            wire.close()


def test_a_connection_that_was_used_before_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_server() as server, nothing_stays(server):
        for beginning in (b"\r\n", b"GET /status HTTP/1.1\r\n"):
            wire = Wire(server.url).request("/", {"prompt": "ab"})
            wire.read_until(b'"finish_reason"')
            monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.1)
            wire.send(beginning)
            assert b"200 OK" in wire.read_to_end()
            wire.close()
            monkeypatch.undo()


def test_a_request_that_has_come_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_server() as server, nothing_stays(server):
        with SingleSteps():
            asked = in_background(ask, server, "ab")
            wait_until(lambda: server.service.running == 1)
            assert server.call(lambda: timers(server, OF_HEADERS)) == []
            monkeypatch.setattr(http_protocol, "HEADER_SECONDS", 0.01)
            idle = Wire(server.url)
            assert idle.read_to_end() == b""  # it came later, and has been closed meanwhile
            idle.close()
        assert asked.result(PATIENCE).json()["response"] == answer_alone("ab")


def test_idle_and_half_open_connections_cost_the_others_nothing() -> None:
    with in_process_server(mock_settings(users=2)) as server, nothing_stays(server):
        wires = [Wire(server.url) for _ in range(50)]
        for wire in wires[::2]:
            wire.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        asked = [in_background(ask, server, prompt) for prompt in long_prompts(4)]
        for prompt, one in zip(long_prompts(4), asked):
            assert one.result(PATIENCE).json()["response"] == answer_alone(prompt)
        for wire in wires:
            wire.close()


NOT_FINITE = "the logits of this request are not finite"


def test_numbers_that_are_none_end_one_request_only() -> None:
    first, second = long_prompts(2)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a" + FAILS}]}
    with in_process_server(mock_settings(users=8), llm_that_fails) as server, nothing_stays(server):
        with SingleSteps():
            good = [in_background(ask, server, one) for one in (first, second)]
            whole = in_background(ask, server, "a" + FAILS)
            stream = in_background(ask, server, "a" + FAILS, stream=True)
            openai = in_background(post, server, "/v1/chat/completions", chat)
            wait_until(lambda: server.service.running == 5)
        for prompt, one in zip((first, second), good):
            assert one.result(PATIENCE).json()["response"] == answer_alone(prompt)
        assert whole.result(PATIENCE).status_code == 500
        assert whole.result().json() == {"error": NOT_FINITE, "code": "generation_failed"}
        *deltas, error = events_of(stream.result(PATIENCE).text)
        assert error == {"error": NOT_FINITE, "code": "generation_failed", "status": 500}
        assert all(set(delta) == {"delta"} for delta in deltas)
        assert openai.result(PATIENCE).json()["error"]["message"] == NOT_FINITE
        # The slots that failed serve the next ones.
        asked = [in_background(ask, server, first) for _ in range(8)]
        assert {one.result(PATIENCE).json()["response"] for one in asked} == {answer_alone(first)}


def test_a_device_that_fails_once_ends_that_step_only() -> None:
    failing = [False]

    def before(call: Any) -> None:
        if failing[0]:
            failing[0] = False
            raise RuntimeError("the device stumbles")

    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        return mock_llm(settings, before=before, **options)

    first, second = long_prompts(2)
    with in_process_server(mock_settings(users=1), open_llm) as server, nothing_stays(server):
        with SingleSteps() as steps:
            hit = in_background(ask, server, first)
            wait_until(lambda: server.service.running == 1)
            steps.step()
            spared = in_background(ask, server, second)
            wait_until(lambda: server.service.running == 2)
            failing[0] = True
            steps.step()
        assert hit.result(PATIENCE).status_code == 500
        assert "the device stumbles" in hit.result().text
        assert spared.result(PATIENCE).json()["response"] == answer_alone(second)
        assert server.llm().failure is None


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def poisoned(steps: Path) -> Iterator[ServerProcess]:
    """The real model, which meets NaN where a prompt has the marker in it."""
    arguments = ("--users", "4", "--seq-length", "128", "--drain", "240")
    with server_to_hold(steps, *arguments, fault="nan,held") as process:
        yield process


def greedy(server: Any, prompt: str, **fields: Any) -> httpx.Response:
    return ask(server, prompt, temperature=0, max_tokens=24, **fields)


QUESTIONS = [QUESTION, "你好", "Who are you?"]


@pytest.mark.slow
def test_nan_on_the_real_device_ends_one_request_only(poisoned: ServerProcess) -> None:
    alone = [greedy(poisoned, one).json()["response"] for one in QUESTIONS]
    assert all(alone)
    for stream in (False, True):
        bad = in_background(greedy, poisoned, QUESTION + MARKER, stream=stream)
        good = [in_background(greedy, poisoned, one) for one in QUESTIONS]
        assert [one.result(PATIENCE).json()["response"] for one in good] == alone
        response = bad.result(PATIENCE)
        error = events_of(response.text)[-1] if stream else response.json()
        assert error["error"] == NOT_FINITE
        assert response.status_code == (200 if stream else 500)
    # What is left in the slot does not affect its next user.
    again = [in_background(greedy, poisoned, one) for one in QUESTIONS + QUESTIONS[:1]]
    assert [one.result(PATIENCE).json()["response"] for one in again] == alone + alone[:1]
    assert get(poisoned, "/v2/health/ready").status_code == 200


@pytest.mark.slow
def test_the_real_process_keeps_nothing_of_bad_connections(poisoned: ServerProcess) -> None:
    alone = greedy(poisoned, QUESTION).json()["response"]
    files = open_files(poisoned.pid)
    for fault in (FAULTS["response reset in its body"], FAULTS["request cut in its body"]):
        with ChaosProxy(poisoned.url, fault) as proxy:
            victims = [in_background(try_to_ask, proxy, "你好", True) for _ in range(6)]
            wires = [Wire(poisoned.url) for _ in range(6)]
            for wire in wires:
                wire.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            assert greedy(poisoned, QUESTION).json()["response"] == alone
            for wire in wires:
                wire.reset()
            for victim in victims:
                assert victim.result(PATIENCE) is None
    wait_until(lambda: open_files(poisoned.pid) <= files)
    wait_until(lambda: {slot["state"] for slot in slots(poisoned)} <= {"free", "idle"})
    assert status(poisoned)["queue"]["waiting"] == 0
    assert status(poisoned)["totals"]["compiles_after_ready"] == 0


def status(server: ServerProcess) -> dict[str, Any]:
    shown: dict[str, Any] = get(server, "/status").json()
    return shown


def slots(server: ServerProcess) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = status(server)["slots"]
    return shown


@pytest.mark.slow
def test_sigterm_under_load_lets_everybody_finish(poisoned: ServerProcess, steps: Path) -> None:
    """The last one of this server."""
    fields = {"temperature": 0, "max_tokens": 60}
    alone = {one: ask(poisoned, one, **fields).json()["response"] for one in QUESTIONS}
    before_them = status(poisoned)["totals"]["requests"]
    with held_steps(steps):
        asked: list[tuple[str, Future[httpx.Response]]] = [
            (one, in_background(ask, poisoned, one, **fields)) for one in QUESTIONS * 3
        ]
        # All of them are accepted, and some still wait for a slot.
        wait_until(lambda: status(poisoned)["totals"]["requests"] == before_them + len(asked))
        before = len(poisoned.lines)
        poisoned.signal(signal.SIGTERM)
        poisoned.wait_for("draining")
        refused = ask(poisoned, QUESTION)
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert get(poisoned, "/v2/health/ready").status_code == 503
        assert get(poisoned, "/v2/health/live").status_code == 200
    for question, one in asked:
        assert one.result(PATIENCE).json()["response"] == alone[question]
    assert poisoned.wait() == 0
    assert {json.loads(line)["level"] for line in poisoned.lines[before:]} == {"info"}
