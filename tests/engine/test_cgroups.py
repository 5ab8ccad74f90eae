"""Cores whose time a container may use, on machines simulated by files."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from glm_multiuser import device
from glm_multiuser.cgroups import cpu_limit
from glm_multiuser.device import cores

V1 = {"proc/self/cgroup": "4:cpu,cpuacct:/a/b\n5:memory:/a\n"}
V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1_QUOTA, V1_PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def machine(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 4),
        ({**V2, "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 2),
        ({**V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                **V2,
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
            },
            2,
        ),
        (
            {
                **V1,
                f"sys/fs/cgroup/cpu/a/b/{V1_QUOTA}": "300000\n",
                f"sys/fs/cgroup/cpu/a/b/{V1_PERIOD}": "100000\n",
            },
            3,
        ),
        (
            {
                **V1,
                f"sys/fs/cgroup/cpu/a/{V1_QUOTA}": "-1\n",
                f"sys/fs/cgroup/cpu/a/{V1_PERIOD}": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_least_of_all_groups(
    tmp_path: Path, files: dict[str, str], limit: Optional[int]
) -> None:
    assert cpu_limit(machine(tmp_path, files)) == limit


def test_no_more_cores_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    for limit, expected in ((None, 64), (4, 4), (100, 64)):
        monkeypatch.setattr(device, "cpu_limit", lambda limit=limit: limit)
        assert cores() == expected
