"""Parses the kernels of a dry-run process from MindSpore's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

ON_THE_CARD = ("aclnn", "aclop")

CHOSEN = re.compile(r"(\S+) select (\w+) kernel")
"""An operator and its kernel kind; logged once per operator and process."""

FALLBACK = re.compile(r"node is (\S+) should backoff")
NO_ADAPTER = re.compile(r"Cannot get adapter for (\S+)")


@dataclass(frozen=True)
class Findings:
    """Kernels by operator, and problems."""

    kernels: dict[str, str]
    problems: list[str]


def read(text: str) -> Findings:
    """Parses MindSpore's log, which has DEVICE from INFO on and the rest from WARNING."""
    chosen = [(match[1], match[2]) for match in CHOSEN.finditer(text)]
    problems = [
        f"{name} gets a kernel of {kind}" for name, kind in chosen if kind not in ON_THE_CARD
    ]
    problems += [f"{match[1]} falls back to the CPU" for match in FALLBACK.finditer(text)]
    problems += [f"{match[1]} has no adapter for GE" for match in NO_ADAPTER.finditer(text)]
    kernels = {name: kind for name, kind in chosen if kind in ON_THE_CARD}
    return Findings(kernels, sorted(set(problems)))
