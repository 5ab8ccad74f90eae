"""What the plan says about a CPU is what a process takes, within five percent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.backends.native import library

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan_memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_plan_is_within_five_percent_of_measured_memory() -> None:
    reason = library.unavailable_reason("CPU")
    if reason:
        pytest.skip(reason)
    child = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, check=False
    )
    assert child.stdout, child.stderr
    (run,) = json.loads(child.stdout.splitlines()[-1])["runs"]
    assert run["plan"] == run["weights"] + run["caches"] + run["workspace"]
    assert abs(run["plan"] / run["peak"] - 1) < 0.05, run
    assert child.returncode == 0, child.stderr
