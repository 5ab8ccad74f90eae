"""The life cycle of a server, from start to shutdown."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from glm_multiuser import ConfigError, MultiUserLLM
from glm_multiuser.cli.serve import read_prompts
from glm_multiuser.server.run import listen, url_of
from glm_multiuser.server.settings import Limits, ModelSettings, ServerSettings
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    Wire,
    answer_alone,
    ask,
    errors_of,
    events_of,
    get,
    in_background,
    long_prompts,
    step,
)
from tests.server.held_steps import held_steps, server_to_hold
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)
from tests.server.process import ROOT, SERVE, START_SECONDS, ServerProcess

pytestmark = pytest.mark.slow

CHECKPOINT = ROOT / "ckpt" / "glm-tiny"


# In this process.


def test_the_warm_up_has_run_before_the_server_is_ready() -> None:
    prompts: list[str] = []
    go_on, first = threading.Event(), threading.Event()

    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        llm: Any = mock_llm(settings, **options)
        generate = llm.generate

        def watched(texts: Any, params: Any) -> Any:
            prompts.extend(texts)
            first.set()
            assert go_on.wait(PATIENCE)
            return generate(texts, params)

        llm.generate = watched
        opened: MultiUserLLM = llm
        return opened

    settings = mock_settings(warm_up=("第一", "second"), names=("one", "two"))
    with in_process_server(settings, open_llm, ready=False) as server:
        try:
            assert first.wait(PATIENCE)
            assert get(server, "/v2/health/ready").status_code == 503
            assert get(server, "/status").json()["loading"] == {
                "model": "one",
                "done": 0,
                "total": 2,
                "what": "warm-up prompts",
            }
            assert ask(server, "ab").status_code == 503
            assert prompts == ["第一"]
        finally:
            go_on.set()
        wait_until(lambda: server.service.ready)
        assert prompts == ["第一", "second"] * 2
        assert get(server, "/v2/health/ready").status_code == 200
        assert server.llm("one").stats().tokens_generated == 16


def test_a_model_without_a_tokenizer_is_warmed_up_with_token_ids() -> None:
    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        llm = mock_llm(settings, **options)
        llm.tokenizer = None
        return llm

    with in_process_server(open_llm=open_llm) as server:
        assert server.llm().stats().tokens_generated == 8
        refused = ask(server, "ab")
        assert refused.status_code == 400
        assert "this checkpoint has no tokenizer; give token ids" in refused.json()["error"]


def test_warm_up_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("你好\n\n  \nWho are you?\r\n", encoding="utf-8")
    assert read_prompts(file) == ("你好", "Who are you?")
    file.write_text("你好", encoding="utf-8-sig")
    assert read_prompts(file) == ("你好",)
    with pytest.raises(ConfigError, match="cannot read the warm-up prompts"):
        read_prompts(tmp_path / "nothing")


def test_what_does_not_end_in_time_ends_with_an_error_of_its_own() -> None:
    (prompt,) = long_prompts(1)
    told = "the server ended before this request"
    settings = mock_settings(users=1, drain_seconds=0.0)
    with in_process_server(settings) as server:
        with SingleSteps() as steps:
            streaming = Wire(server.url).request("/", {"prompt": prompt, "stream": True})
            wait_until(lambda: server.service.running == 1)
            steps.step()
            streaming.read_until(b"data: ")
            stepping = in_background(step, server, "an id", prompt)
            wait_until(lambda: server.service.running == 2)
            whole = in_background(ask, server, prompt)
            wait_until(lambda: server.service.running == 3)
            server.end()
            wait_until(lambda: None not in errors_of(server))
        for one in (stepping, whole):
            assert one.result(PATIENCE).status_code == 503
            assert one.result().json() == {"error": told, "code": "shutting_down"}
        error = events_of(streaming.read_to_end().decode())[-1]
        assert error == {"error": told, "code": "shutting_down", "status": 503}
        streaming.close()


def test_a_generation_of_the_step_api_that_nobody_reads_does_not_hold_the_end_up() -> None:
    """Beyond the time that it is given; `in_process_server` waits for the end."""
    with in_process_server(mock_settings(drain_seconds=0.0)) as server:
        assert first_text(server, long_prompts(1)[0])
        assert server.service.running == 1


def first_text(server: InProcessServer, prompt: str) -> str:
    """What the step API returns after one step."""
    with SingleSteps() as steps:
        first = in_background(step, server, "an id", prompt)
        wait_until(lambda: server.service.running == 1)
        steps.step()
        return str(first.result(PATIENCE).json()["delta_text"])


def test_the_step_api_goes_on_until_the_last_text_is_fetched() -> None:
    (prompt,) = long_prompts(1)
    with in_process_server() as server:
        texts = [first_text(server, prompt)]
        server.end()
        wait_until(lambda: server.service.state == "draining")
        flag = ""
        while flag != "end":
            answer = step(server, "an id").json()
            texts.append(answer["delta_text"])
            flag = answer["flag"]
        assert "".join(texts) == answer_alone(prompt)


def test_a_server_that_is_asked_to_end_while_it_loads_gives_up_at_the_next_graph() -> None:
    loading, gave_up, enough = threading.Event(), threading.Event(), threading.Event()

    def endless_llm(settings: ModelSettings, progress: Any, **options: Any) -> MultiUserLLM:
        try:
            while not enough.wait(0.001):
                progress(1, 1000, "a graph")
                loading.set()
        finally:
            gave_up.set()
        raise AssertionError("it did not give up")

    with in_process_server(open_llm=endless_llm, ready=False) as server:
        try:
            assert loading.wait(PATIENCE)
            server.end()
            assert gave_up.wait(PATIENCE)
        finally:
            enough.set()
    assert server.service.state == "draining"


# A port.


def test_a_port_that_somebody_has_is_refused_at_once() -> None:
    host = "127.77.0.1"  # an address of its own: no other process takes the port once it is free
    with listen(host, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on host '{host}', port {port}"):
            listen(host, port)
    listen(host, port).close()


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("192.0.2.1", 0)])
def test_an_address_that_is_not_ours(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on host '{host}'"):
        listen(host, port)


def test_who_connects_before_the_first_request_is_answered_waits() -> None:
    with listen("127.0.0.1", 0) as listening, socket.socket() as early:
        early.settimeout(PATIENCE)
        early.connect(listening.getsockname())


def test_the_url_of_either_family() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert url_of(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"
    with listen("::1", 0) as listening:
        assert url_of(listening) == f"http://[::1]:{listening.getsockname()[1]}"


# Settings.


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "模型", "x" * 65, "a\n"])
def test_a_model_name_that_cannot_stand_in_a_url(name: str) -> None:
    with pytest.raises(ConfigError, match="model name is"):
        ModelSettings(name, Path("nowhere"))


@pytest.mark.parametrize("field", Limits.__dataclass_fields__)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_of_nothing(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}; it must be more than 0"):
        Limits(**{field: value})  # type: ignore[arg-type]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="models is empty"):
        ServerSettings(())
    with pytest.raises(ConfigError, match="models has one twice"):
        mock_settings(names=("one", "two", "one"))
    for seconds in (-0.1, float("inf"), float("nan")):
        with pytest.raises(
            ConfigError, match=f"drain_seconds is {seconds}; it must be between 0 and 86400"
        ):
            mock_settings(drain_seconds=seconds)


# As a process.


def assert_begins(process: ServerProcess, folder: Path) -> None:
    """A generation of the step API, of which the rest stays to be fetched."""
    with held_steps(folder) as let:
        let(1)
        assert step(process, "an id", long_prompts(1)[0]).json()["flag"] == "sending"


def test_the_end_of_a_process_that_answers(tmp_path: Path) -> None:
    """SIGTERM, with a reader that would go on for longer than there is time."""
    arguments = ("--drain", "0", "--users", "1")
    with server_to_hold(tmp_path, *arguments, fault="mock") as process:
        assert process.url.startswith("http://127.0.0.1:")
        assert ask(process, "ab").json()["response"] == answer_alone("ab")
        assert_begins(process, tmp_path)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.events("shutdown requested")[0]["signal"] == "SIGTERM"
        assert [len(process.events(event)) for event in ("draining", "ended")] == [1, 1]


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    arguments = ("--drain", "10000", "--step-expiry", "10000", "--users", "1")
    with server_to_hold(tmp_path, *arguments, fault="mock") as process:
        assert_begins(process, tmp_path)
        process.signal(signal.SIGINT)
        process.wait_for("draining")
        assert ask(process, "ab").status_code == 503
        process.signal(signal.SIGINT)
        assert process.wait() == 130


def test_the_end_of_a_process_that_is_loading() -> None:
    command = (sys.executable, "-m", "tests.server.faulty_server", "stuck", "serve")
    with ServerProcess(command=command, ready=False) as process:
        wait_until(lambda: get(process, "/status").json()["loading"])
        assert get(process, "/v2/health/ready").status_code == 503
        assert get(process, "/v2/health/live").status_code == 200
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not process.events("ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_right_after_the_address_is_printed(number: signal.Signals) -> None:
    command = (sys.executable, "-m", "tests.server.faulty_server", "stuck", "serve")
    with ServerProcess(command=command, ready=False) as process:
        process.signal(number)
        assert process.wait() == 0
        assert [line["signal"] for line in process.events("shutdown requested")] == [number.name]


def test_the_real_model_is_loaded_graph_by_graph_and_given_up_in_between(tmp_path: Path) -> None:
    # Native kernels have one graph.
    arguments = ("--users", "8", "--kernels", "portable")
    with (
        held_steps(tmp_path) as let,
        server_to_hold(tmp_path, *arguments, fault="loading", ready=False) as process,
    ):
        seen: list[Any] = [None]

        def has_graphs() -> Any:
            loading = get(process, "/status").json()["loading"]
            if loading != seen[-1] and loading and "prefill" in loading["what"]:
                seen.append(loading)
                if loading["done"] < 2:
                    let(1)
            return seen[-1] and seen[-1]["done"] >= 2

        wait_until(has_graphs)
        assert get(process, "/v2/health/ready").status_code == 503
        assert ask(process, "ab").status_code == 503
        process.signal(signal.SIGTERM)
        process.wait_for("shutdown requested")
        let(1)
        assert process.wait(START_SECONDS) == 0
        assert not process.events("model ready")
        assert process.lines[-1].startswith("{")  # and no traceback


def test_a_checkpoint_that_is_broken_ends_the_process_with_a_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(CHECKPOINT, folder)
    # Found only while the model is loaded; what the headers of its files tell is found earlier.
    weights = load_file(CHECKPOINT / "model.safetensors")
    weights["lm_head.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with ServerProcess("--checkpoint", str(folder), ready=False) as process:
        assert process.wait(START_SECONDS) == 2
        error = " ".join(line for line in process.lines[1:] if not line.startswith("{"))
        assert "model.safetensors" in error
        assert "Traceback" not in "".join(process.lines)
        assert not process.events("ready")
        assert len(process.events("ended")) == 1


def test_a_checkpoint_that_is_not_there_and_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for arguments, told in (
            (("--checkpoint", "/nowhere"), "no checkpoint at /nowhere"),
            (("--port", port), f"cannot listen on host '127.0.0.1', port {port}"),
        ):
            ended = subprocess.run(
                [*SERVE, *arguments],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=START_SECONDS,
            )
            assert ended.returncode == 2
            assert told in " ".join(ended.stderr.split())
            assert len(ended.stderr.splitlines()) < 5
            assert ended.stdout == ""
