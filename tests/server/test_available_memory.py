"""Available memory on this machine, and on machines simulated by files."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_multiuser.server.available_memory import available_bytes, total_bytes

GIB = 2**30
MACHINE = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"
V1, V2 = "4:memory:/a/b\n0::/\n", "0::/a/b\n"
V1_FOLDER, V2_FOLDER = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def machine(folder: Path, cgroup: str = "", **files: str) -> Path:
    """A root folder; names of files have `__` for `/`."""
    for name, text in {
        "proc/meminfo": MACHINE,
        "proc/self/cgroup": cgroup,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def group(folder: str, v1: bool, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    """The files of a control group."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else (
            "memory.max",
            "memory.current",
        )
    )
    stat = f"anon 7\n{'total_' if v1 else ''}inactive_file {cache}\nactive_file 9\n"
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def test_this_machine() -> None:
    psutil = pytest.importorskip("psutil")
    before = psutil.virtual_memory().available
    available = available_bytes()
    after = psutil.virtual_memory().available  # other processes come and go meanwhile
    assert available is not None
    assert 0 < available <= max(before, after) + GIB


def test_a_machine_without_limits_has_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == 8 * GIB


def test_a_system_that_does_not_say_it(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("place", ["", "/a", "/a/b"])
def test_a_control_group_or_one_around_it_has_less(tmp_path: Path, v1: bool, place: str) -> None:
    folder = (V1_FOLDER if v1 else V2_FOLDER) + place
    files = group(folder, v1, str(4 * GIB), 3 * GIB, cache=GIB // 2)
    assert available_bytes(machine(tmp_path, V1 if v1 else V2, **files)) == 3 * GIB // 2


@pytest.mark.parametrize(("v1", "limit"), [(True, str(2**63 - 4096)), (False, "max")])
def test_a_control_group_without_a_limit(tmp_path: Path, v1: bool, limit: str) -> None:
    folder = (V1_FOLDER if v1 else V2_FOLDER) + "/a/b"
    files = group(folder, v1, limit, 3 * GIB)
    assert available_bytes(machine(tmp_path, V1 if v1 else V2, **files)) == 8 * GIB


def test_a_control_group_that_is_full(tmp_path: Path) -> None:
    files = group(f"{V2_FOLDER}/a/b", False, str(GIB), 2 * GIB)
    assert available_bytes(machine(tmp_path, V2, **files)) == 0


@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize("place", ["", "/a", "/a/b"])
def test_all_memory_is_the_limit_of_a_control_group(tmp_path: Path, v1: bool, place: str) -> None:
    folder = (V1_FOLDER if v1 else V2_FOLDER) + place
    files = group(folder, v1, str(4 * GIB), 3 * GIB)
    assert total_bytes(machine(tmp_path, V1 if v1 else V2, **files)) == 4 * GIB


@pytest.mark.parametrize(("v1", "limit"), [(True, str(2**63 - 4096)), (False, "max")])
def test_all_memory_without_a_limit(tmp_path: Path, v1: bool, limit: str) -> None:
    folder = (V1_FOLDER if v1 else V2_FOLDER) + "/a/b"
    files = group(folder, v1, limit, 3 * GIB)
    assert total_bytes(machine(tmp_path, V1 if v1 else V2, **files)) == 16 * GIB
    assert total_bytes(tmp_path / "nothing") is None
