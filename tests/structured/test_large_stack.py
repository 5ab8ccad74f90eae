"""Threads with a large stack, where the system limits what may be reserved."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITED = """
import resource
import sys
from glm_multiuser.worker_threads import on_large_stack

pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(on_large_stack(lambda: 7))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="statm is Linux's")
@pytest.mark.parametrize(
    ("mebibytes", "told"), [(1000, "7"), (120, "7"), (10, "GLMMultiUserError no thread with")]
)
def test_less_memory_than_the_largest(mebibytes: int, told: str) -> None:
    command = [sys.executable, "-c", LIMITED, str(mebibytes)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith(told)
