"""The Dockerfile; tests/packaging runs its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glm_multiuser.cli.serve import DEFAULT_PORT
from tests.deploy.dockerfile import (
    DOCKERFILE,
    Instruction,
    command_with,
    commands,
    instructions,
)


def test_hadolint_finds_nothing() -> None:
    # A program in a wheel is beside Python, which need not be on the path.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=places)
    assert hadolint, "the extra dev has it"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_without_root_in_a_slim_image_with_the_wheel_alone() -> None:
    found = instructions()
    bases = [one.value for one in found if one.name == "FROM"]
    assert bases[0].endswith(" AS wheel")
    last = found[found.index(Instruction("FROM", bases[-1])) :]
    assert "-slim-" in bases[-1]
    assert not {"COPY", "ADD"} & {one.name for one in last}
    names = [one.name for one in last]
    (user,) = (one.value for one in last if one.name == "USER")
    assert user.split(":")[0] not in ("0", "root")
    assert "RUN" not in names[names.index("USER") :]


def test_the_port_is_that_of_the_command() -> None:
    (port,) = (one.value for one in instructions() if one.name == "EXPOSE")
    assert int(port) == DEFAULT_PORT
    (check,) = commands("HEALTHCHECK")
    assert f"'127.0.0.1', {port}" in check[-1]


@pytest.mark.slow
def test_debian_has_what_it_installs() -> None:
    if not shutil.which("apt-get"):
        pytest.skip("needs apt-get")
    (install,) = (
        part.strip() for part in command_with("apt-get").split("&&") if " install " in part
    )
    known = subprocess.run(["apt-cache", "policy", "apt-utils"], capture_output=True, text=True)
    if "Candidate: (none)" in known.stdout or not known.stdout:
        pytest.skip("needs apt-get update")
    done = subprocess.run([*install.split(), "--simulate"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
