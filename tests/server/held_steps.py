"""A server whose steps a test can block, which pauses its streams.

Each step reads a byte from a named pipe. While the other end is closed, steps do not wait.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable

from tests.server.process import ServerProcess

VARIABLE = "TEST_STEPS"


@contextmanager
def server_to_hold(
    folder: Path, *arguments: str, fault: str = "held", **options: Any
) -> Iterator[ServerProcess]:
    """`glm-multiuser serve` with `arguments`; its pipe is in `folder`.

    Args:
        fault: one of `tests.server.faulty_server` with blockable steps, or several with commas.
        options: of `ServerProcess`.
    """
    command = (sys.executable, "-m", "tests.server.faulty_server", fault, "serve")
    environment = {VARIABLE: str(_pipe(folder))}
    with ServerProcess(*arguments, command=command, environment=environment, **options) as process:
        yield process


@contextmanager
def held_steps(folder: Path) -> Iterator[Callable[[int], None]]:
    """Blocks the steps of the server in `folder`; yields a function that allows some of them.

    May start before the server.
    """
    pipe = os.open(_pipe(folder), os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):  # what an earlier test let the server make, and it did not need
        os.read(pipe, 1024)

    def let(steps: int) -> None:
        os.write(pipe, b"." * steps)

    try:
        yield let
    finally:
        os.close(pipe)


def wait_for_steps() -> Callable[[], None]:
    """In the server: returns the function that every step calls first."""
    # Opening does not block; reads block once the other end is open.
    pipe = os.open(os.environ[VARIABLE], os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)

    def wait() -> None:
        os.read(pipe, 1)

    return wait


def _pipe(folder: Path) -> Path:
    pipe = folder / "steps"
    with suppress(FileExistsError):
        os.mkfifo(pipe)
    return pipe
