"""A network of this thread's own, in which there is only loopback."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


@contextmanager
def own_network() -> Iterator[None]:
    """Ray listens on every address that it finds; in here it finds loopback and nothing else.

    It holds for this thread, and for the processes and threads that it starts. Skips the test where
    that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    mine = Path("/proc/thread-self/ns/net")
    if not mine.exists():
        pytest.skip("Ray needs a network of its own here; this is not Linux")
    before = os.open(mine, os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            pytest.skip(f"Ray needs a network of its own here; unshare says: {reason}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            if libc.setns(before, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot go back to the network of before")
    finally:
        os.close(before)
