"""The real device thread, one step at a time."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from glm_multiuser.device_thread import DEVICE_THREAD, DeviceThread

PATIENCE = 180.0
"""Timeout in seconds for tests that would hang."""


class SingleSteps:
    """Inside its block the device thread runs only the steps requested by `step`.

    It blocks the thread with calls, because between two calls every engine runs one step.
    """

    def __init__(self, thread: DeviceThread = DEVICE_THREAD) -> None:
        self._thread = thread
        self._held = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._over = False
        self._caller = threading.Thread(target=lambda: thread.call(self._hold), daemon=True)

    def __enter__(self) -> SingleSteps:
        self._caller.start()
        self._wait()
        return self

    def step(self) -> None:
        """Lets every engine run exactly one step."""
        self._go.release()
        self._wait()

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._go.release()
        self._caller.join(PATIENCE)

    def _wait(self) -> None:
        assert self._held.acquire(timeout=PATIENCE), "the device thread did not come back"

    def _hold(self) -> None:
        """Runs on the device thread."""
        self._held.release()
        assert self._go.acquire(timeout=PATIENCE), "the next step was not released"
        if not self._over:
            self._thread._calls.appendleft((Future(), self._hold))
