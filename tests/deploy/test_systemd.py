"""The systemd unit; tests/packaging runs its command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from glm_multiuser.server.settings import ServerSettings
from tests.deploy.unit import PREFIX, UNIT, values

MOST_EXPOSED = "20"
"""Of 100, which a service without any restriction nearly has."""


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """For a command that exists on this machine."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    command = tmp_path / "bin/glm-multiuser"
    command.parent.mkdir()
    command.touch(0o755)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(PREFIX, str(tmp_path)))
    return copy


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def test_systemd_reads_it(unit: Path) -> None:
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_little_is_exposed(unit: Path) -> None:
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(unit))
    if "unrecognized option" in done.stderr:
        pytest.skip("needs systemd 250")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_requests_have_time_to_end() -> None:
    (seconds,) = values("TimeoutStopSec")
    assert int(seconds) > ServerSettings.drain_seconds + 10
