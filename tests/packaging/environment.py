"""An environment with the wheel in it, and how the tests run its command."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Union

VARIABLES = {"PYTHONPATH": ""}
"""Of the environment; the checkout may be on the path of the tests."""


def run(
    *command: Union[str, Path], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Fails with what the command printed unless it ends with exit code 0."""
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **VARIABLES, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to start its command in."""

    environment: Path
    folder: Path

    @property
    def packages(self) -> Path:
        """Its folder `site-packages`."""
        (found,) = self.environment.glob("lib/python3*/site-packages")
        return found

    @property
    def data(self) -> Path:
        """The files beside the code."""
        return self.packages / "glm_multiuser" / "data"

    @property
    def command(self) -> Path:
        return self.environment / "bin" / "glm-multiuser"

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command."""
        return run(self.command, *arguments, folder=self.folder)

    def python(self, *arguments: Union[str, Path]) -> str:
        """What its Python prints."""
        return run(self.environment / "bin" / "python", *arguments, folder=self.folder).stdout
