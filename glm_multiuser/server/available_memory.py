"""Total and available memory of this process on Linux, including cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from glm_multiuser.cgroups import groups, number_of

FOLDERS = {"memory": "sys/fs/cgroup/memory", "": "sys/fs/cgroup"}
"""Controller name -> folder; "memory" is cgroup v1, "" is v2."""
FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    "": ("memory.max", "memory.current"),
}
"""Controller name -> limit file and usage file."""


def total_bytes(root: Path = Path("/")) -> Optional[int]:
    """Returns the memory of this machine, or the limit of this process's cgroup if that is less.

    Args:
        root: folder with `proc` and `sys`.

    Returns:
        Bytes; None if the system does not report them.
    """
    machine = number_of(root / "proc/meminfo", r"MemTotal:\s+(\d+) kB")
    limits = (number_of(place / limit_file, r"(\d+)") for place, limit_file, _ in _cgroups(root))
    found = [None if machine is None else machine * 1024, *limits]
    return min((size for size in found if size is not None), default=None)


def available_bytes(root: Path = Path("/")) -> Optional[int]:
    """Returns the memory available on this machine, or in this process's cgroup if that is less.

    Argument and result are those of `total_bytes`.
    """
    machine = number_of(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB")
    found = [] if machine is None else [machine * 1024]
    return min([*found, *_left_in_cgroups(root)], default=None)


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in this process's cgroup and its parents, for those with a limit."""
    for place, limit_file, usage_file in _cgroups(root):
        limit = number_of(place / limit_file, r"(\d+)")
        usage = number_of(place / usage_file, r"(\d+)")
        if limit is not None and usage is not None:
            # The page cache is freed when memory is needed.
            cache = number_of(place / "memory.stat", r"(?:total_)?inactive_file (\d+)") or 0
            yield max(0, limit - usage + cache)


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folder, limit file and usage file of this process's cgroup and of its parents."""
    for controller, place in groups(root, FOLDERS):
        yield (place, *FILES[controller])
