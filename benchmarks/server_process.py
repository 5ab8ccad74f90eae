"""Server processes for benchmarks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from glm_multiuser.cli import screen
from glm_multiuser.errors import GLMMultiUserError
from glm_multiuser.server.run import listen

START_SECONDS = 600.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def server(what: str, command: Sequence[str], ready_path: str) -> Iterator[str]:
    """Runs a command with `--port` appended; yields its URL once ready, and stops it at the end.

    Raises:
        GLMMultiUserError: it exited, or is not ready after `START_SECONDS`.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    screen.notice(f"{what}: starting ...")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)], stdout=log, stderr=log
        )
        try:
            _wait(process, url + ready_path)
            yield url
        except GLMMultiUserError:
            log.seek(0)
            screen.notice(log.read()[-4000:].decode("utf-8", "replace"))
            raise
        finally:
            process.terminate()
            process.wait(60.0)


def serve_command(checkpoint: Path, users: int, seq_length: int, *more: str) -> list[str]:
    """Runs `glm-multiuser serve`."""
    sizes = ["--users", str(users), "--seq-length", str(seq_length)]
    return ["-m", "glm_multiuser.cli", "serve", "--checkpoint", str(checkpoint), *sizes, *more]


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise GLMMultiUserError(f"the server ended with code {process.returncode}")
        try:
            with urlopen(url, timeout=5.0):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise GLMMultiUserError(f"the server was not ready after {START_SECONDS:g} seconds")
