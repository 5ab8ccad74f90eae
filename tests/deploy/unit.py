"""The systemd unit."""

from __future__ import annotations

from tests.deploy.dockerfile import ROOT

UNIT = ROOT / "deploy/systemd/glm-multiuser.service"
PREFIX = "/opt/glm-multiuser"
"""The environment that it starts the command of."""


def values(name: str) -> list[str]:
    """Of every line with this setting."""
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[2] for line in lines if line.partition("=")[0] == name]


def exec_start(prefix: str, options: str) -> list[str]:
    """What systemd executes, where the package is in another environment."""
    (line,) = values("ExecStart")
    return line.replace(PREFIX, prefix).replace("$OPTIONS", options).split()
