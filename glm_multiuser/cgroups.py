"""Control groups of this process on Linux, and their limit of processor time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional

CPU_FOLDERS = {"cpu": "sys/fs/cgroup/cpu", "": "sys/fs/cgroup"}
"""Controller -> folder: "cpu" is cgroup v1, "" is v2."""


def groups(root: Path, folders: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yields controller and folder of this process's cgroup and of its parents.

    Args:
        root: folder with `proc` and `sys`.
        folders: folder of each wanted controller, below `root`.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in folders.keys() & set(controllers.split(",")):
            top = root / folders[controller]
            group = top / path.lstrip("/")
            for place in (group, *group.parents):
                yield controller, place
                if place == top:
                    break


def cpu_limit(root: Path = Path("/")) -> Optional[int]:
    """Returns the cores whose time the cgroups allow, rounded up, as `docker run --cpus` sets them.

    Args:
        root: folder with `proc` and `sys`.

    Returns:
        None without a limit.
    """
    limits = []
    for controller, place in groups(root, CPU_FOLDERS):
        if controller == "cpu":
            quota = text_of(place / "cpu.cfs_quota_us"), text_of(place / "cpu.cfs_period_us")
            match = re.fullmatch(r"(\d+)\s+(\d+)\s*", "".join(quota))
        else:
            match = re.fullmatch(r"(\d+) (\d+)\s*", text_of(place / "cpu.max"))
        if match and int(match[2]):
            limits.append(math.ceil(int(match[1]) / int(match[2])))
    return max(1, min(limits)) if limits else None


def number_of(path: Path, pattern: str) -> Optional[int]:
    """Returns the number in the line of a file that has this pattern, if there is one."""
    match = re.search(f"^{pattern}$", text_of(path), re.MULTILINE)
    return int(match[1]) if match else None


def text_of(path: Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
