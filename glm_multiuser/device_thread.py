"""The single thread of a process that makes all MindSpore calls.

A device context belongs to the thread that created it, and MindSpore's executor is not re-entrant:
two models run from two threads deadlock. So this thread steps all engines of the process in turn,
and runs all other calls to the device (building, compiling, resizing).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Callable, Optional, TypeVar

from glm_multiuser.errors import EngineClosedError
from glm_multiuser.progress import Progress

Result = TypeVar("Result")
Stepper = Callable[[], bool]
"""Runs one step; returns whether more work may be pending."""


class DeviceThread:
    """Runs calls in order of arrival, interleaved with one step of each attached engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._steppers: tuple[Stepper, ...] = ()
        self._awake = False
        self._stopping = False
        self._thread: Optional[threading.Thread] = None
        self._process = 0

    def check_process(self) -> None:
        """Raises EngineClosedError in a process that was forked after this thread started.

        Threads are not forked, so calls would wait for ever.
        """
        if self._forked:
            raise EngineClosedError(
                f"this process was forked from process {self._process}, which has opened a model; "
                "start it with multiprocessing's 'spawn', and open its own"
            )

    def check_open(self) -> None:
        """Raises EngineClosedError if a new call or request would wait for ever: in a forked
        process, and when this one is about to end."""
        self.check_process()
        if self._stopping:
            raise EngineClosedError("the device thread has ended, as this process is about to")

    @property
    def _forked(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs `function` on the device thread and returns its result or raises its error."""
        self.check_process()
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Result] = Future()
        with self._changed:
            self.check_open()
            self._start()
            self._calls.append((future, function))  # type: ignore[arg-type]
            self._changed.notify()
        try:
            return future.result()
        finally:
            del future  # its error refers to this frame: a reference cycle

    def yield_to_engines(self, seconds: float) -> None:
        """Steps the engines for about `seconds`, or until they are idle.

        For long calls on the device thread, between two of their steps. An engine that the call
        changes must not be attached.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._step_each():
            pass

    def yielding(self, report: Progress) -> Progress:
        """Wraps a progress callback to step the engines for as long as the last part took.

        Users continue at half speed while another model is loaded and compiled.
        """
        since = time.monotonic()

        def report_and_yield(done: int, total: int, what: str) -> None:
            nonlocal since
            report(done, total, what)
            self.yield_to_engines(time.monotonic() - since)
            since = time.monotonic()

        return report_and_yield

    def attach(self, stepper: Stepper) -> None:
        """Adds `stepper`, which is called in turn as long as any stepper returns True."""
        with self._changed:
            self._start()
            self._steppers += (stepper,)
        self.wake()

    def detach(self, stepper: Stepper) -> None:
        """Removes `stepper`, if it is attached."""
        with self._changed:
            self._steppers = tuple(other for other in self._steppers if other != stepper)

    def wake(self) -> None:
        """Wakes the thread because an engine has work."""
        if self._forked:
            return  # the lock may have been held
        with self._changed:
            self._awake = True
            self._changed.notify()

    @property
    def stopped(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Ends the thread after the current step; called at exit."""
        if self._forked:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a process can exit without `close`; stopped by atexit, so that it
            # never ends in the middle of a device call.
            self._process = os.getpid()  # first, because other threads check both without the lock
            self._thread = threading.Thread(target=self._run, name="device", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def _run(self) -> None:
        while self._run_once():
            pass  # no local variable here, which could keep a model alive

    def _run_once(self) -> bool:
        """Runs at most one call, and one step of every engine; returns False to stop."""
        with self._changed:
            while not (self._calls or self._awake or self._stopping):
                self._changed.wait()
            if self._stopping:
                return False
            self._awake = False
        if self._calls:
            self._complete_next()
        if self._step_each():
            self._awake = True  # nobody waits but this thread, so neither lock nor notification
        return True

    def _complete_next(self) -> None:
        future, function = self._calls.popleft()
        try:
            future.set_result(function())
        except BaseException as error:  # including KeyboardInterrupt, for the caller
            future.set_exception(error)
            del future  # as in `call`

    def _step_each(self) -> bool:
        """Runs one step of every engine; returns whether any may have more work."""
        more = False
        for stepper in self._steppers:
            more |= stepper()
        return more


DEVICE_THREAD = DeviceThread()
"""The device thread of this process."""
