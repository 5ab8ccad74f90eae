"""The one thread of a process that makes every MindSpore call.

A device context belongs to the thread that made it, and MindSpore's executor is not re-entrant:
two models run from two threads deadlock. So every engine of the process is stepped here, in
turn, and every other call to the device (building, compiling, resizing) runs here, too.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Callable, Optional, TypeVar

from glm_multiuser.progress import Progress

Result = TypeVar("Result")
Stepper = Callable[[], bool]
"""Runs one step; returns whether there may be more to do."""


class DeviceThread:
    """Runs calls in order of arrival, and between them one step of each attached engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._steppers: list[Stepper] = []
        self._awake = False
        self._stopping = False
        self._thread: Optional[threading.Thread] = None

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the device thread and returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Result] = Future()
        with self._changed:
            if self._stopping:
                raise RuntimeError("the device thread has ended, as this process is about to")
            self._start()
            self._calls.append((future, function))  # type: ignore[arg-type]
            self._changed.notify()
        try:
            return future.result()
        finally:
            del future  # its error refers to this frame, which would keep it

    def yield_to_engines(self, seconds: float) -> None:
        """Lets the engines run for about `seconds`, or until they have nothing to do.

        For a long call, on the device thread and between two of its steps. An engine that this
        very call changes must not be attached.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._step_each():
            pass

    def yielding(self, report: Progress) -> Progress:
        """Progress that lets the engines run for as long as the last part took.

        So their users go on, at half their speed, while another model is loaded and compiled.
        """
        since = time.monotonic()

        def report_and_yield(done: int, total: int, what: str) -> None:
            nonlocal since
            report(done, total, what)
            self.yield_to_engines(time.monotonic() - since)
            since = time.monotonic()

        return report_and_yield

    def attach(self, stepper: Stepper) -> None:
        """From now on `stepper` is called in turn, as long as it returns True."""
        with self._changed:
            self._start()
            self._steppers.append(stepper)
        self.wake()

    def detach(self, stepper: Stepper) -> None:
        """Forgets `stepper`; harmless if it is not attached."""
        with self._changed:
            self._steppers = [other for other in self._steppers if other != stepper]

    def wake(self) -> None:
        """Wakes the thread: an engine has something to do."""
        with self._changed:
            self._awake = True
            self._changed.notify()

    @property
    def stopped(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ends the thread after the current step; for the end of the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a process that forgot to close can end; stopped by atexit, so that
            # it never ends in the middle of a call to the device.
            self._thread = threading.Thread(target=self._run, name="device", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def _run(self) -> None:
        while self._run_once():
            pass  # between two turns no variable keeps a model alive

    def _run_once(self) -> bool:
        """At most one call, and one step of every engine; returns whether to go on."""
        with self._changed:
            while not (self._calls or self._awake or self._stopping):
                self._changed.wait()
            if self._stopping:
                return False
            self._awake = False
        if self._calls:
            self._complete_next()
        if self._step_each():
            self.wake()
        return True

    def _complete_next(self) -> None:
        future, function = self._calls.popleft()
        try:
            future.set_result(function())
        except BaseException as error:  # the caller gets whatever happened, also an interrupt
            future.set_exception(error)
            del future  # as in `call`

    def _step_each(self) -> bool:
        """One step of every engine; returns whether any of them had something to do."""
        with self._changed:
            steppers = list(self._steppers)
        more = False
        for stepper in steppers:
            more |= stepper()
        return more


DEVICE_THREAD = DeviceThread()
"""There is one device thread per process."""
