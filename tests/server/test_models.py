"""Models are loaded, unloaded, fail and restart without affecting users of other models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from glm_multiuser import ConfigError, EngineConfig, GenerationError, MultiUserLLM
from glm_multiuser.server.loading import memory_bytes
from glm_multiuser.server.models import RESTARTS, ModelHost
from glm_multiuser.server.settings import ModelSettings
from tests.engine.mock_runner import Call
from tests.engine.stepping import SingleSteps
from tests.server.asking import (
    FAILS,
    HTTP,
    Wire,
    answer_alone,
    ask,
    events_of,
    get,
    in_background,
    is_idle,
    llm_that_fails,
    long_prompts,
    nothing_stays,
    streamed_text,
)
from tests.server.in_process import (
    PATIENCE,
    InProcessServer,
    in_process_server,
    mock_llm,
    mock_settings,
    wait_until,
)

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).resolve().parents[2] / "ckpt" / "glm-tiny"


class Device:
    """Opens mocks, and fails where the test wants it to.

    Attributes:
        broken: whether every call to a runner raises.
        opening: what happens to who opens a model; may block or raise.
        opened: names of the models that were opened.
    """

    def __init__(self) -> None:
        self.broken = False
        self.opening: Callable[[str], None] = lambda name: None
        self.opened: list[str] = []

    def open_llm(self, settings: ModelSettings, **options: Any) -> MultiUserLLM:
        self.opening(settings.name)
        self.opened.append(settings.name)
        return mock_llm(settings, before=self.before, **options)

    def before(self, call: Call) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")


@pytest.fixture
def device() -> Device:
    return Device()


def start(server: InProcessServer, work: Coroutine[Any, Any, None]) -> Future[None]:
    """On the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, server.loop)


def finish(server: InProcessServer, work: Coroutine[Any, Any, None]) -> None:
    start(server, work).result(PATIENCE)


def state_of(server: InProcessServer, name: str) -> str:
    return str(server.service.models.get(name).state)


def refused(server: InProcessServer, model: str) -> tuple[int, str]:
    """Status and message for a question to this model."""
    response = ask(server, "ab", model=model)
    if response.status_code == 503:
        assert int(response.headers["retry-after"]) >= 1
    return response.status_code, response.json().get("error", "")


def test_a_request_without_a_model_goes_to_the_first_one() -> None:
    with in_process_server(mock_settings(names=("one", "two"))) as server:
        ask(server, "ab")
        ask(server, "ab", model="")
        ask(server, "ab", model="two")
        generated = {name: server.llm(name).stats().tokens_generated for name in ("one", "two")}
        assert generated["one"] > generated["two"] > 8  # of the warm-up
        status, message = refused(server, "three")
        assert (status, message) == (404, "model 'three' is unknown; this server has one, two")


def test_a_model_that_is_unloaded_ends_what_runs_and_takes_nothing_new() -> None:
    first, second = long_prompts(2)
    with in_process_server(mock_settings(names=("one", "two"))) as server, nothing_stays(server):
        with SingleSteps() as steps:
            running = in_background(ask, server, first, model="one")
            wait_until(lambda: server.service.running == 1)
            other = Wire(server.url).request("/", _stream(second, "two"))
            wait_until(lambda: server.service.running == 2)
            steps.step()
            unloading = start(server, server.service.models.unload("one"))
            wait_until(lambda: state_of(server, "one") == "unloading")
            assert refused(server, "one") == (503, "model 'one' is unloading: it was unloaded")
            steps.step()
        unloading.result(PATIENCE)
        assert running.result(PATIENCE).json()["response"] == answer_alone(first)
        other.read_until(b'"finish_reason"')
        assert streamed_text(other.received.decode()) == answer_alone(second)
        other.close()
        assert refused(server, "one") == (503, "model 'one' is unloaded: it was unloaded")
        assert server.service.ready
        assert ask(server, "ab", model="two").status_code == 200
        finish(server, server.service.models.load("one"))
        assert ask(server, first, model="one").json()["response"] == answer_alone(first)


def test_a_model_that_cannot_be_closed_has_failed_and_can_be_tried_again() -> None:
    with in_process_server() as server:
        llm: Any = server.llm()
        llm.close = partial(_fail, "no such device")
        with pytest.raises(OSError, match="no such device"):
            finish(server, server.service.models.unload("mock"))
        why = "model 'mock' is failed: it could not be closed: no such device"
        assert refused(server, "mock") == (503, why)
        del llm.close
        finish(server, server.service.models.load("mock"))
        assert ask(server, "ab").status_code == 200


def _fail(message: str, seconds: float) -> None:
    raise OSError(message)


def _stream(prompt: str, model: str) -> dict[str, Any]:
    return {"prompt": prompt, "model": model, "stream": True}


def test_what_does_not_end_in_time_is_cancelled_with_an_error_of_its_own() -> None:
    settings = mock_settings(drain_seconds=0.0)
    with in_process_server(settings) as server, nothing_stays(server):
        with SingleSteps() as steps:
            streaming = in_background(ask, server, long_prompts(1)[0], stream=True)
            wait_until(lambda: server.service.running == 1)
            steps.step()
            whole = in_background(ask, server, long_prompts(1)[0])
            wait_until(lambda: server.service.running == 2)
            engine = server.llm()._engine
            unloading = start(server, server.service.models.unload("mock"))
            wait_until(lambda: all(request.cancelled for request in engine._accepted()))
        unloading.result(PATIENCE)
        response = whole.result(PATIENCE)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"] == "the model was closed before the answer was complete"
        assert events_of(streaming.result(PATIENCE).text)[-1]["status"] == 503


def test_a_model_is_loaded_while_others_answer(device: Device) -> None:
    go_on, opening = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        opening.set()
        assert go_on.wait(PATIENCE)

    settings = mock_settings(names=("one", "two"))
    models = (settings.models[0], replace(settings.models[1], load=False))
    with in_process_server(replace(settings, models=models), device.open_llm) as server:
        assert device.opened == ["one"]
        assert refused(server, "two") == (503, "model 'two' is unloaded")
        device.opening = wait
        loading = start(server, server.service.models.load("two"))
        try:
            assert opening.wait(PATIENCE)
            assert refused(server, "two") == (503, "model 'two' is loading")
            assert ask(server, "ab", model="one").json()["response"] == answer_alone("ab")
            assert server.service.ready
        finally:
            go_on.set()
        loading.result(PATIENCE)
        assert ask(server, "ab", model="two").json()["response"] == answer_alone("ab")


def test_a_model_is_loaded_again_when_something_about_it_changes(device: Device) -> None:
    with in_process_server(open_llm=device.open_llm) as server, nothing_stays(server):
        models = server.service.models
        finish(server, models.load("mock"))
        assert device.opened == ["mock"]  # it is ready, and nothing is different
        finish(server, models.load("mock", users=3))
        assert device.opened == ["mock", "mock"]
        assert server.llm().stats().users == 3
        assert ask(server, "ab").json()["response"] == answer_alone("ab")


def test_a_model_for_which_there_is_no_memory_is_refused_with_numbers(device: Device) -> None:
    one = ModelSettings("one", CHECKPOINT, EngineConfig(users=2))
    two = ModelSettings("two", CHECKPOINT, EngineConfig(users=2), load=False)
    needed = memory_bytes(one)
    settings = replace(mock_settings(), models=(one, two), memory_gib=1.5 * needed / 2**30)
    with in_process_server(settings, device.open_llm) as server, nothing_stays(server):
        with pytest.raises(ConfigError) as error:
            finish(server, server.service.models.load("two"))
        mib = needed / 2**20
        assert str(error.value) == (
            f"model 'two' needs {mib:.1f} MiB for its weights and caches; "
            f"{mib:.1f} of {1.5 * mib:.1f} MiB are taken"
        )
        assert device.opened == ["one"]
        assert state_of(server, "two") == "unloaded"
        with pytest.raises(ConfigError, match="model 'one' needs"):
            finish(server, server.service.models.load("one", users=1000))
        assert ask(server, "ab", model="one").status_code == 200  # it is still there as it was
        finish(server, server.service.models.unload("one"))
        finish(server, server.service.models.load("two"))
        assert ask(server, "ab", model="two").status_code == 200


def test_a_model_that_does_not_fit_at_the_start_ends_the_server(device: Device) -> None:
    model = ModelSettings("one", CHECKPOINT)
    settings = replace(mock_settings(), models=(model,), memory_gib=2**-10)
    told = pytest.raises(ConfigError, match=r"of 1\.0 MiB are taken")
    with told, in_process_server(settings, device.open_llm) as server:
        assert not server.service.ready
    assert device.opened == []


def test_a_model_that_cannot_be_loaded_harms_nobody_and_can_be_tried_again(device: Device) -> None:
    def fail(name: str) -> None:
        raise ConfigError("its checkpoint is broken")

    (prompt,) = long_prompts(1)
    settings = mock_settings(names=("one", "two"))
    with in_process_server(settings, device.open_llm) as server, nothing_stays(server):
        finish(server, server.service.models.unload("two"))
        device.opening = fail
        with SingleSteps() as steps:
            running = in_background(ask, server, prompt, model="one")
            wait_until(lambda: server.service.running == 1)
            steps.step()
            with pytest.raises(ConfigError, match="its checkpoint is broken"):
                finish(server, server.service.models.load("two"))
        assert running.result(PATIENCE).json()["response"] == answer_alone(prompt)
        assert refused(server, "two") == (503, "model 'two' is failed: its checkpoint is broken")
        assert (server.service.ready, server.service.live) == (True, True)
        device.opening = lambda name: None
        finish(server, server.service.models.load("two"))
        assert ask(server, prompt, model="two").json()["response"] == answer_alone(prompt)


def test_a_model_whose_warm_up_fails_is_not_ready_and_takes_nothing() -> None:
    opened: list[Any] = []

    def open_llm(settings: ModelSettings, **options: Any) -> MultiUserLLM:
        opened.append(llm_that_fails(settings, **options))
        return opened[-1]

    settings = mock_settings(warm_up=("ab", "a" + FAILS))
    told = pytest.raises(GenerationError, match="logits of this request are not finite")
    with told, in_process_server(settings, open_llm) as server:
        assert not server.service.ready
    assert server.service.models.get(None).engine is None
    assert [llm._runner.closed for llm in opened] == [True]


def broken_engine(server: InProcessServer, device: Device) -> list[Any]:
    """Lets the engine of the first model fail while four requests are with it; their responses."""
    with SingleSteps() as steps:
        asked = []
        for number, stream in enumerate((False, True, False, True)):
            asked.append(in_background(ask, server, long_prompts(1)[0], stream=stream))
            server.wait_until_running(number + 1)
        steps.step()
        device.broken = True
        for _ in range(3):
            steps.step()
        engine = server.service.models.get(None).engine
        assert engine is not None
        assert isinstance(engine.failure, GenerationError)
    return [one.result(PATIENCE) for one in asked]


def test_an_engine_that_fails_is_started_again_by_itself(device: Device) -> None:
    def repaired(name: str) -> None:
        device.broken = False

    settings = mock_settings(users=1, names=("one", "two"))
    with in_process_server(settings, device.open_llm) as server, nothing_stays(server):
        device.opening = repaired
        whole, streamed, *queued = broken_engine(server, device)
        assert whole.status_code == queued[0].status_code == 500
        assert "the device failed in this request's step: the device is lost" in whole.text
        assert events_of(streamed.text)[-1]["code"] == "generation_failed"
        assert events_of(queued[1].text)[-1]["status"] == 500
        assert is_idle(server)
        wait_until(lambda: device.opened == ["one", "two", "one"] and server.service.ready)
        assert server.service.live
        for model in ("one", "two"):
            answer = ask(server, "ab", model=model).json()
            assert answer["response"] == answer_alone("ab")


def test_an_engine_that_does_not_start_again_makes_the_server_hopeless(device: Device) -> None:
    tries: list[str] = []

    def fail(name: str) -> None:
        tries.append(name)
        raise RuntimeError("no device")

    with in_process_server(mock_settings(users=1), device.open_llm) as server:
        assert get(server, "/v2/health/live").status_code == 200
        device.opening = fail
        broken_engine(server, device)
        wait_until(lambda: not server.service.live)
        assert tries == ["mock"] * RESTARTS
        assert not server.service.ready
        assert get(server, "/v2/health/live").status_code == 503
        assert get(server, "/v2/health/ready").status_code == 503
        assert get(server, "/status").json()["state"] == "failed"
        assert refused(server, "mock") == (503, "model 'mock' is failed: no device")
        device.broken, device.opening = False, lambda name: None
        finish(server, server.service.models.load("mock"))
        assert server.service.live
        assert ask(server, "ab").json()["response"] == answer_alone("ab")


def test_while_a_model_is_started_again_the_server_is_not_ready(device: Device) -> None:
    go_on, opening = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        device.broken = False
        opening.set()
        assert go_on.wait(PATIENCE)

    with in_process_server(mock_settings(users=1), device.open_llm) as server:
        device.opening = wait
        try:
            broken_engine(server, device)
            assert opening.wait(PATIENCE)
            assert HTTP.get(f"{server.url}/v2/health/ready").status_code == 503
            assert HTTP.get(f"{server.url}/v2/health/live").status_code == 200
            assert refused(server, "mock")[0] == 503
        finally:
            go_on.set()
        wait_until(lambda: server.service.ready)


class StubEngine:
    """An engine that has failed, or has not."""

    def __init__(self, failure: Optional[Exception]) -> None:
        self.failure = failure
        self.closed = False

    def close(self, drain: float) -> None:
        self.closed = True


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs coroutines in one event loop: in Python 3.9 locks belong to that of their creation."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop.run_until_complete
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def host(device: Device, run: Run) -> Iterator[ModelHost]:
    made = ModelHost(mock_settings(), device.open_llm, lambda name, llm: None)
    yield made
    run(made.close())


def test_a_model_that_somebody_changed_meanwhile_is_not_started_again(
    host: ModelHost, device: Device, run: Run
) -> None:
    model = host.get(None)

    async def scenario() -> None:
        model.engine, model.state = StubEngine(RuntimeError("lost")), "ready"  # type: ignore
        await host._changing.acquire()  # as while a model is being loaded
        restarting = asyncio.ensure_future(host.restart_failed())
        await asyncio.sleep(0)
        fresh = model.engine = StubEngine(None)  # type: ignore
        host._changing.release()
        await restarting
        assert not fresh.closed
        await host._changing.acquire()
        model.engine = StubEngine(RuntimeError("lost"))  # type: ignore
        restarting = asyncio.ensure_future(host.restart_failed())
        await asyncio.sleep(0)
        model.engine, model.state = None, "unloaded"
        host._changing.release()
        await restarting
        assert device.opened == []
        assert model.state == "unloaded"

    run(scenario())


def test_an_engine_that_failed_and_cannot_be_closed_is_lost(host: ModelHost, run: Run) -> None:
    model = host.get(None)
    failed: Any = StubEngine(RuntimeError("no such device"))
    failed.close = partial(_fail, "no such device")
    model.engine, model.state = failed, "ready"
    run(host.restart_failed())
    assert (model.state, model.lost) == ("failed", True)


def test_a_model_that_cannot_be_closed_leaves_the_others_to_be(run: Run) -> None:
    host = ModelHost(mock_settings(names=("one", "two")), Device().open_llm, lambda name, llm: None)
    engines: list[Any] = [StubEngine(None), StubEngine(None)]
    engines[0].close = partial(_fail, "no such device")
    for model, engine in zip(host, engines):
        model.engine, model.state = engine, "ready"
    run(host.close())
    assert [model.state for model in host] == ["failed", "unloaded"]
    assert engines[1].closed
