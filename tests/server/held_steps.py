"""A server whose steps wait while a test holds them: what streams then stands still.

Each step reads a byte of a named pipe. There is none to read, and none to wait for, while nobody
holds its other end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable

from tests.server.process import ServerProcess

VARIABLE = "TEST_STEPS"
COMMAND = (sys.executable, "-m", "tests.server.faulty_server", "held", "serve")


@contextmanager
def server_to_hold(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """`glm-multiuser serve` with `arguments`; its pipe is in `folder`."""
    pipe = folder / "steps"
    os.mkfifo(pipe)
    with ServerProcess(*arguments, command=COMMAND, environment={VARIABLE: str(pipe)}) as process:
        yield process


@contextmanager
def held_steps(folder: Path) -> Iterator[Callable[[int], None]]:
    """Holds the steps of the server there until the end; calls let it make so many of them."""
    pipe = os.open(folder / "steps", os.O_WRONLY)
    _take_back(folder)

    def let(steps: int) -> None:
        os.write(pipe, b"." * steps)

    try:
        yield let
    finally:
        os.close(pipe)


def _take_back(folder: Path) -> None:
    """Steps that an earlier test let the server make, and that it did not need."""
    pipe = os.open(folder / "steps", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError):
            while os.read(pipe, 1024):
                pass
    finally:
        os.close(pipe)
