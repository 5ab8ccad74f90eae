"""Worker processes, measured in turn, as many at once as memory allows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from glm_multiuser.cli import screen
from glm_multiuser.cli.measure import fields
from glm_multiuser.errors import GLMMultiUserError

RESERVE_MB = 1500.0
"""Kept free: out of memory, other processes would be killed."""


class Worker:
    """A process that measures one variant with a fixed number of users, and idles in between.

    Raises:
        GLMMultiUserError: it fails to start.
    """

    def __init__(self, command: Sequence[str], job: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.ready = self._ask(json.dumps(job))

    def measure(self) -> dict[str, Any]:
        return self._ask("measure")

    def memory_mb(self) -> float:
        """Its current memory."""
        return memory(Path(f"/proc/{self.process.pid}/status"), "VmRSS") or 0.0

    def close(self) -> None:
        """Waits for a regular exit."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            found = json.loads(answer) if answer else {"error": "its process died"}
        except (BrokenPipeError, ValueError):
            found = {"error": "its process died"}
        if "error" in found:
            self.close()
            raise GLMMultiUserError(found["error"])
        return dict(found)


class Pool:
    """The workers of one number of users and one context. They are used in turn, so when memory is
    short, the most recently used one is evicted first."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.peaks: dict[str, float] = {}

    def measure(
        self, name: str, command: Sequence[str], job: dict[str, Any], estimate_mb: float
    ) -> dict[str, Any]:
        """Measures once, and starts the worker if necessary.

        Raises:
            GLMMultiUserError: there is not enough memory for it, or it failed.
        """
        self._make_room(name, self.peaks.get(name, estimate_mb))
        worker = self.workers.pop(name, None) or Worker(command, job)
        found = worker.measure()
        self.workers[name] = worker  # at the end: most recently used
        self.peaks[name] = max(found["peak_mb"], self.peaks.get(name, 0.0))
        return {**worker.ready, **found}

    def close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()

    def _make_room(self, name: str, need_mb: float) -> None:
        if name in self.workers:
            need_mb -= self.workers[name].memory_mb()
        while True:
            free = available_mb()
            if free is None or free - RESERVE_MB >= need_mb:
                return
            others = [one for one in self.workers if one != name]
            if not others:
                raise GLMMultiUserError(
                    f"it would need about {need_mb:,.0f} MB, and {free:,.0f} MB are free"
                )
            screen.notice(f"the memory is short: ending {others[-1]}, which starts again later")
            self.workers.pop(others[-1]).close()


def available_mb() -> Optional[float]:
    return memory(Path("/proc/meminfo"), "MemAvailable")


def memory(path: Path, field: str) -> Optional[float]:
    try:
        return fields(path.read_text(encoding="ascii", errors="replace"))[field] / 1024
    except (OSError, KeyError):
        return None
