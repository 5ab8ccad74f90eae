"""Total and available memory of this process on Linux, including cgroup limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

CGROUPS = {
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
}
"""Controller name -> folder, limit file and usage file; "memory" is cgroup v1, "" is v2."""


def total_bytes(root: Path = Path("/")) -> Optional[int]:
    """Returns the memory of this machine, or the limit of this process's cgroup if that is less.

    Args:
        root: folder with `proc` and `sys`.

    Returns:
        Bytes; None if the system does not report them.
    """
    machine = _number(root / "proc/meminfo", r"MemTotal:\s+(\d+) kB")
    limits = (_number(place / limit_file, r"(\d+)") for place, limit_file, _ in _cgroups(root))
    found = [None if machine is None else machine * 1024, *limits]
    return min((size for size in found if size is not None), default=None)


def available_bytes(root: Path = Path("/")) -> Optional[int]:
    """Returns the memory available on this machine, or in this process's cgroup if that is less.

    Args:
        root: folder with `proc` and `sys`.

    Returns:
        Bytes; None if the system does not report them.
    """
    machine = _number(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB")
    found = [] if machine is None else [machine * 1024]
    return min([*found, *_left_in_cgroups(root)], default=None)


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in this process's cgroup and its parents, for those with a limit."""
    for place, limit_file, usage_file in _cgroups(root):
        limit = _number(place / limit_file, r"(\d+)")
        usage = _number(place / usage_file, r"(\d+)")
        if limit is not None and usage is not None:
            # The page cache is freed when memory is needed.
            cache = _number(place / "memory.stat", r"(?:total_)?inactive_file (\d+)") or 0
            yield max(0, limit - usage + cache)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folder, limit file and usage file of this process's cgroup and of its parents."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in CGROUPS.keys() & set(controllers.split(",")):
            folder, limit_file, usage_file = CGROUPS[controller]
            top = root / folder
            group = top / path.lstrip("/")
            for place in (group, *group.parents):
                yield place, limit_file, usage_file
                if place == top:
                    break


def _number(path: Path, pattern: str) -> Optional[int]:
    match = re.search(f"^{pattern}$", _text(path), re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    """Content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
