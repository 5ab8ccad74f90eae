"""Structured logs: one line of JSON per event, correlated by request id."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from glm_multiuser.server.logs import (
    FIELDS,
    JsonFormatter,
    TextFormatter,
    configure_logging,
    request_id,
)
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    Wire,
    answer_alone,
    ask,
    in_background,
    is_idle,
    llm_that_fails,
    nothing_stays,
    post,
    step_to_end,
)
from tests.server.in_process import (
    PATIENCE,
    in_process_server,
    mock_settings,
    wait_until,
)
from tests.server.process import ServerProcess

SECRET = "你知道什么 a private question"
MESSAGES = [{"role": "user", "content": SECRET}]
TEXTS = {"prompt", "history", "tools", "answer", "calls"}


class Log:
    """What was logged since the test began, as it would stand on stderr."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def lines(self, event: str) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in parsed if line["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """These lines, as soon as there are so many: they come after the answer has gone out."""
        wait_until(lambda: len(self.lines(event)) >= count)
        return self.lines(event)


@pytest.fixture
def log() -> Iterator[Log]:
    log, root = Log(), logging.getLogger()
    handler = logging.StreamHandler(log.stream)
    handler.setFormatter(JsonFormatter())
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield log
    root.setLevel(level)
    root.removeHandler(handler)


def test_an_answer_leaves_two_lines_with_the_id_that_its_header_names(log: Log) -> None:
    with in_process_server() as server:
        response = ask(server, "ab", max_tokens=5)
        (answered,) = log.wait_for("request")
    (ended,) = log.lines("generation ended")
    assert answered["request_id"] == ended["request_id"] == response.headers["x-request-id"]
    assert answered["level"] == "info"
    assert {name: answered[name] for name in ("method", "path", "status")} == {
        "method": "POST",
        "path": "/",
        "status": 200,
    }
    assert 0 <= ended["queued_seconds"] <= ended["seconds"] <= answered["seconds"]
    ended = {name: ended[name] for name in list(ended) if not name.endswith("seconds")}
    assert set(ended) == {
        *("time", "level", "logger", "event", "request_id"),
        *("model", "key", "outcome", "prompt_tokens", "completion_tokens"),
    }
    assert (ended["model"], ended["key"], ended["outcome"]) == ("mock", "anonymous", "length")
    assert (ended["prompt_tokens"], ended["completion_tokens"]) == (3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["abc", "a" * 64, "A.b_c-9"])
def test_an_id_that_the_client_gave_is_kept(log: Log, given: str) -> None:
    with in_process_server() as server:
        assert ask(server, "ab").headers["x-request-id"] != given
        response = post(server, "/", {"prompt": "ab"}, x_request_id=given)
        assert response.headers["x-request-id"] == given
        assert log.wait_for("request", 2)[1]["request_id"] == given


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "a" * 65, "a b", 'a"b', "a\\n", "é", "<b>", "../x", "a\tb"])
def test_an_id_that_could_do_harm_is_replaced(log: Log, given: str) -> None:
    with in_process_server() as server:
        wire = Wire(server.url).request("/", {"prompt": "ab"}, x_request_id=given)
        head = wire.read_until(b"}").partition(b"\r\n\r\n")[0].decode()
        wire.close()
        (line,) = log.wait_for("request")
    assert len(line["request_id"]) == 32
    assert f"x-request-id: {line['request_id']}" in head


def test_requests_at_the_same_time_have_ids_of_their_own(log: Log) -> None:
    with in_process_server(mock_settings(users=2)) as server:
        with SingleSteps():
            asked = []
            for number in range(4):
                body = {"prompt": "ab", "stream": number % 2 == 0, "max_tokens": number + 1}
                asked.append(in_background(post, server, "/", body, x_request_id=f"id-{number}"))
                server.wait_until_running(number + 1)
        for one in asked:
            one.result(PATIENCE)
        log.wait_for("request", 4)
    tokens = {
        line["request_id"]: line["completion_tokens"] for line in log.lines("generation ended")
    }
    assert tokens == {f"id-{number}": number + 1 for number in range(4)}


@pytest.mark.slow
def test_what_was_refused_or_failed_has_a_line_too(log: Log) -> None:
    with in_process_server(mock_settings(keys={"me": "k" * 16}), llm_that_fails) as server:
        key = {"authorization": "Bearer " + "k" * 16}
        for expected, body, headers in (
            (401, {"prompt": "ab"}, {}),
            (400, {"prompt": 7}, key),
            (500, {"prompt": FAILS}, key),
        ):
            response = post(server, "/", body, **headers)
            assert response.status_code == expected
        lines = log.wait_for("request", 3)
    assert [line["status"] for line in lines] == [401, 400, 500]
    (ended,) = log.lines("generation ended")
    assert (ended["outcome"], ended["key"]) == ("error", "me")
    assert "traceback" in log.lines("request failed")[0]
    assert "k" * 16 not in log.text


def test_who_went_away_is_logged_as_that(log: Log) -> None:
    with in_process_server() as server, nothing_stays(server), SingleSteps():
        whole = Wire(server.url).request("/", {"prompt": "ab"})
        wait_until(lambda: server.service.running == 1)
        whole.close()
        log.wait_for("request", 1)
        half = Wire(server.url)
        half.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        half.close()
        lines = log.wait_for("request", 2)
    assert [line["status"] for line in lines] == [499, "client disconnected"]
    assert [line["outcome"] for line in log.lines("generation ended")] == ["cancelled"]
    assert not log.lines("request failed")
    assert "error" not in {json.loads(line)["level"] for line in log.text.splitlines()}


@pytest.mark.slow
@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_and_answers_are_logged_only_where_that_is_wanted(
    log: Log, log_prompts: bool
) -> None:
    history = [["an earlier secret", "and its answer"]]
    with in_process_server(mock_settings(log_prompts=log_prompts, users=4)) as server:
        answer = ask(server, SECRET).json()["response"]
        ask(server, "ab", history=history, stream=True)
        step_to_end(server, "my id", SECRET)
        chat = {"messages": MESSAGES, "model": "mock"}
        assert post(server, "/v1/chat/completions", chat).status_code == 200
        post(server, "/", {"prompt": [SECRET]})  # what is wrong with it is told to its sender only
        post(server, "/", {"prompt": SECRET, "history": [[SECRET]]})
        log.wait_for("request", 6)
        wait_until(lambda: is_idle(server))
    everything = "".join(json.loads(line).__str__() for line in log.text.splitlines())
    ended = log.lines("generation ended")
    assert answer == answer_alone(SECRET)
    if not log_prompts:
        for text in ("知道", "private", "earlier", "its answer", answer, answer[:12]):
            assert text not in everything
        assert not any(TEXTS & set(line) for line in ended)
        return
    assert (ended[0]["prompt"], ended[0]["answer"]) == (SECRET, answer)
    assert (ended[1]["prompt"], ended[1]["history"]) == ("ab", history)
    assert [line["prompt"] for line in ended] == [SECRET, "ab", SECRET, SECRET]


@pytest.mark.slow
def test_every_line_of_the_real_server_is_json(server: ServerProcess) -> None:
    response = ask(server, "你是谁", max_tokens=4)
    assert response.status_code == 200
    ours = response.headers["x-request-id"]
    wait_until(lambda: any(line.get("request_id") == ours for line in server.events("request")))
    notice, *lines = server.lines
    assert notice.startswith(f"listening on {server.url}")
    for line in lines:
        assert {"time", "level", "logger", "event"} <= set(json.loads(line))
    assert "你是谁" not in "".join(lines)
    assert json.dumps("你是谁")[1:-1] not in "".join(lines)


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("a.logger", logging.WARNING, "file", 1, message, None, None)
    made.fields = fields
    return made


def test_nothing_can_end_a_line_before_its_end() -> None:
    nasty = "a\nb\rc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci\ud800"
    text = JsonFormatter().format(record(nasty, value=nasty, other=object()))
    assert len(text.splitlines()) == 1
    text.encode("ascii")
    line = json.loads(text)
    assert line["event"] == line["value"] == nasty
    assert line["level"] == "warning"
    assert line["time"].endswith("+00:00")
    assert "request_id" not in line


def test_an_error_brings_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    assert "ValueError: two\nlines" in json.loads(JsonFormatter().format(made))["traceback"]
    assert "ValueError: two" in TextFormatter().format(made)


def test_people_read_text() -> None:
    token = request_id.set("an id")
    try:
        line = TextFormatter().format(record("model ready", model="mock", seconds=1.5))
    finally:
        request_id.reset(token)
    assert line[8:] == " warning model ready model=mock seconds=1.5"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_whole_process_logs_in_one_way(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    monkeypatch.setattr(root, "handlers", root.handlers)
    monkeypatch.setattr(access, "disabled", access.disabled)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    level = root.level
    try:
        configure_logging(as_json)
        logging.getLogger("somebody.else").info("something", extra={FIELDS: {"count": 3}})
        access.info("a line of its own")
        written = stderr.getvalue()
    finally:
        root.setLevel(level)
    assert len(written.splitlines()) == 1
    assert ("count=3" in written) is not as_json
    if as_json:
        assert json.loads(written)["count"] == 3
