"""One thread for every call to the device: order, errors, turns, and the end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Callable

import pytest

from glm_multiuser import device_thread
from glm_multiuser.device_thread import DeviceThread
from glm_multiuser.errors import EngineClosedError

PATIENCE = 60.0


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.stop()


class Stepper:
    """Has work for so many steps."""

    def __init__(self, name: str, steps: int, log: list[str]) -> None:
        self.name, self.steps, self.log = name, steps, log
        self.done = threading.Event()

    def __call__(self) -> bool:
        if not self.steps:
            self.done.set()
            return False
        self.log.append(self.name)
        self.steps -= 1
        return True


def held(thread: DeviceThread) -> Callable[[], None]:
    """Keeps the thread busy with a call, until what is returned is called."""
    busy, go = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert go.wait(PATIENCE)

    caller = threading.Thread(target=lambda: thread.call(hold))
    caller.start()
    assert busy.wait(PATIENCE)

    def release() -> None:
        go.set()
        caller.join(PATIENCE)

    return release


def test_every_call_runs_on_the_same_other_thread(thread: DeviceThread) -> None:
    names = {thread.call(threading.get_ident) for _ in range(3)}
    assert len(names) == 1
    assert threading.get_ident() not in names
    assert thread.call(lambda: threading.current_thread().name) == "device"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_the_caller_gets_the_error_and_the_thread_goes_on(
    thread: DeviceThread, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        thread.call(fail)
    assert caught.value is error
    assert thread.call(lambda: 1) == 1


def test_what_a_call_held_goes_with_its_error(thread: DeviceThread) -> None:
    made: list[weakref.ref[Stepper]] = []

    def fail() -> None:
        large = Stepper("large", 0, [])
        made.append(weakref.ref(large))
        raise ValueError("mine")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            thread.call(fail)
        thread.call(lambda: None)  # the first call has returned on the thread, too
        assert made[0]() is None
    finally:
        gc.enable()


def test_a_call_from_the_thread_itself_runs_at_once(thread: DeviceThread) -> None:
    assert thread.call(lambda: thread.call(lambda: 5) + 1) == 6


def test_steppers_take_turns_and_rest_when_they_have_nothing_to_do(thread: DeviceThread) -> None:
    release = held(thread)
    log: list[str] = []
    a, b = Stepper("a", 3, log), Stepper("b", 5, log)
    thread.attach(a)
    thread.attach(b)
    release()
    assert b.done.wait(PATIENCE)
    assert log == ["a", "b", "a", "b", "a", "b", "b", "b"]
    a.done.clear()
    a.steps = 1
    thread.wake()
    assert a.done.wait(PATIENCE)
    assert log[8:] == ["a"]


def test_a_call_comes_between_the_steps_of_a_busy_engine(thread: DeviceThread) -> None:
    going = threading.Event()
    thread.attach(lambda: not going.is_set())
    assert [thread.call(partial(int, number)) for number in range(5)] == [0, 1, 2, 3, 4]
    going.set()


def test_between_two_calls_every_engine_makes_a_step(thread: DeviceThread) -> None:
    log: list[str] = []
    release = held(thread)
    thread.attach(Stepper("step", 3, log))
    callers = [
        threading.Thread(target=lambda: thread.call(lambda: log.append("call"))) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    while len(thread._calls) < 3:  # until all of them wait for their turn
        callers[0].join(0.001)
    release()
    for caller in callers:
        caller.join(PATIENCE)
    assert log == ["step", "call", "step", "call", "step", "call"]


def test_a_stepper_that_left_is_not_called_again(thread: DeviceThread) -> None:
    release = held(thread)
    log: list[str] = []
    leaving, staying = Stepper("leaving", 9, log), Stepper("staying", 2, log)
    thread.attach(leaving)
    thread.attach(staying)
    thread.detach(leaving)
    thread.detach(leaving)
    release()
    assert staying.done.wait(PATIENCE)
    assert log == ["staying", "staying"]


def test_while_it_waits_it_holds_on_to_nothing(thread: DeviceThread) -> None:
    class Model:
        def step(self) -> bool:
            return False

    model = Model()
    thread.attach(model.step)
    gone = weakref.ref(model)
    thread.call(partial(vars, model))
    thread.detach(model.step)
    del model
    thread.call(lambda: None)
    thread.call(lambda: None)  # the turn before this one has ended
    assert gone() is None


def test_it_stops_after_the_step_that_runs() -> None:
    thread = DeviceThread()
    thread.attach(lambda: True)
    thread.call(lambda: None)
    assert not thread.stopped
    thread.stop()
    thread.stop()
    assert thread.stopped
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    with pytest.raises(EngineClosedError, match="the device thread has ended"):
        thread.call(lambda: None)


def test_it_can_be_stopped_from_a_call_and_before_it_began() -> None:
    thread = DeviceThread()
    thread.call(thread.stop)
    assert thread._thread is not None
    thread._thread.join(PATIENCE)
    assert not thread._thread.is_alive()
    DeviceThread().stop()


def test_a_process_that_forgot_to_close_ends() -> None:
    program = (
        "import runpy\n"
        f"module = runpy.run_path({device_thread.__file__!r})\n"
        "thread = module['DEVICE_THREAD']\n"
        "thread.attach(lambda: True)\n"
        "print(thread.call(lambda: 'still here'))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert (ended.stdout, ended.stderr) == ("still here\n", "")


def test_a_long_call_gives_way_to_the_engines(thread: DeviceThread) -> None:
    log: list[str] = []

    def long_call() -> None:
        log.append("begin")
        thread.yield_to_engines(PATIENCE)
        log.append("end")

    release = held(thread)
    thread.attach(Stepper("step", 3, log))
    caller = threading.Thread(target=lambda: thread.call(long_call))
    caller.start()
    while len(thread._calls) < 1:  # until it waits for its turn
        caller.join(0.001)
    release()
    caller.join(PATIENCE)
    # One step after the call that held the thread; the others until there is nothing to do.
    assert log == ["step", "begin", "step", "step", "end"]


def test_a_call_that_gives_way_goes_on_when_its_time_is_over(
    thread: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    busy = threading.Event()
    clock = SimpleNamespace(monotonic=iter([0.0, 0.004, 0.008, 0.012]).__next__)

    def step() -> bool:
        steps.append(1)
        return not busy.is_set()

    def call() -> int:
        before = len(steps)
        thread.yield_to_engines(0.01)
        return len(steps) - before

    monkeypatch.setattr(device_thread, "time", clock)
    thread.attach(step)
    assert thread.call(call) == 2
    busy.set()


def test_a_call_that_has_no_time_to_give_makes_no_step(thread: DeviceThread) -> None:
    steps: list[int] = []

    def call() -> int:
        before = len(steps)
        thread.yield_to_engines(0.0)
        return len(steps) - before

    def step() -> bool:
        steps.append(1)
        return False

    thread.attach(step)
    assert thread.call(call) == 0
