"""The commands of the Dockerfile, as the tests run them outside of a container."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
FLAGS = re.compile(r"(--[a-z-]+=\S+\s+)*")
"""Of RUN and HEALTHCHECK."""


class Instruction(NamedTuple):
    """One instruction, with its lines joined."""

    name: str
    value: str

    @property
    def command(self) -> list[str]:
        """What RUN, CMD, ENTRYPOINT or HEALTHCHECK executes."""
        value = FLAGS.sub("", self.value, count=1)
        if self.name == "HEALTHCHECK":
            value = value.partition("CMD")[2].strip()
        words: list[str] = json.loads(value) if value.startswith("[") else ["sh", "-ec", value]
        return words


def instructions() -> list[Instruction]:
    """Those of the Dockerfile, in their order."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))
    return [Instruction(*line.split(" ", 1)) for line in re.sub(r"\\\n\s*", "", lines).splitlines()]


def commands(name: str) -> list[list[str]]:
    """What the instructions of this name execute."""
    return [one.command for one in instructions() if one.name == name]


def command_with(text: str) -> str:
    """The only RUN in the form of the shell with this text."""
    (found,) = (command[-1] for command in commands("RUN") if text in command[-1])
    return found


def entrypoint() -> list[str]:
    """What a container executes, without arguments."""
    (found,) = commands("ENTRYPOINT")
    return found
