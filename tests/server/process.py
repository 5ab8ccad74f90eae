"""The real command as a process, with its log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, TypeVar

ROOT = Path(__file__).resolve().parents[2]
MODEL = "glm-tiny"
START_SECONDS = 240.0
END_SECONDS = 60.0

SERVE = (sys.executable, "-m", "glm_multiuser.cli", "serve")

Started = TypeVar("Started", bound="ServerProcess")


class ServerProcess:
    """`glm-multiuser serve` on a free port of the loopback interface.

    Args:
        arguments: of the command.
        command: replaces the command.
        environment: additional variables.
        ready: whether to wait until it accepts requests.
        folder: working directory.
    """

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = SERVE,
        environment: Optional[dict[str, str]] = None,
        ready: bool = True,
        folder: Path = ROOT,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            first = self._wait(lambda: next((line for line in self.lines if "http://" in line), ""))
            self.url = "http://" + first.partition("http://")[2].split(";")[0].split()[0]
            if ready:
                self.wait_for("ready")
        except BaseException:
            self.stop()  # so that it ends its own children, too
            raise

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines with this name so far."""
        parsed = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [line for line in parsed if line["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> dict[str, Any]:
        """Waits for log line number `count` of this name and returns it."""

        def found() -> dict[str, Any]:
            lines = self.events(name)
            return lines[count - 1] if len(lines) >= count else {}

        return dict(self._wait(found))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = END_SECONDS) -> int:
        """Returns the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def stop(self) -> int:
        """Stops it as a service manager does; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """No-op after its exit."""
        self.process.kill()
        self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        # A child that is left keeps the pipe open, and closing it while it is read waits for ever.
        if self.process.stderr is not None and not self._reader.is_alive():
            self.process.stderr.close()

    def __enter__(self: Started) -> Started:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.stop()

    def _read(self) -> None:
        stderr = self.process.stderr
        for line in stderr or ():
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait(self, found: Any) -> Any:
        with self._changed:
            there = self._changed.wait_for(lambda: found() or self._ended, START_SECONDS)
            result = found()
        if not there or not result:
            raise AssertionError("the server did not get there:\n" + "\n".join(self.lines[-50:]))
        return result
