"""Memory and cores that are left, from a folder that looks like the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import facts
from headrace.control_groups import available_bytes, core_quota


def write(folder: Path, **files: str) -> None:
    """Of `a_b_c` the file is `a.b_c`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/a/b", "", ("memory_max", "memory_current", "inactive_file")),
        (
            "4:cpu,memory:/a/b",
            "memory",
            ("memory_limit_in_bytes", "memory_usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_what_is_available_is_the_least_room_of_the_machine_and_of_every_group_above(
    tmp_path: Path, line: str, top: str, names: tuple[str, str, str]
) -> None:
    limit, used, cache = names
    group = tmp_path / "sys/fs/cgroup" / top / "a"
    write(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    write(tmp_path / "proc/self", cgroup=f"3:pids:/x\n{line}\n")
    write(group / "b", **{limit: "5000", used: "3000", "memory_stat": f"anon 1\n{cache} 500\n"})
    assert available_bytes(tmp_path) == 2500
    write(group, **{limit: "9000", used: "8000", "memory_stat": ""})
    assert available_bytes(tmp_path) == 1000
    write(group, **{limit: "7000"})
    assert available_bytes(tmp_path) == 0
    write(group, **{limit: "max"})
    assert available_bytes(tmp_path) == 2500
    # The root group may have a limit too: it is the container's own.
    write(group.parent, **{limit: "4000", used: "3900", "memory_stat": ""})
    assert available_bytes(tmp_path) == 100


def test_a_group_that_cannot_be_seen_from_here_leaves_the_root_that_can(tmp_path: Path) -> None:
    """A container shows its own group as the root, under the path that it has outside."""
    write(tmp_path / "proc/self", cgroup="6:memory:/kube/pod-1\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    write(group, memory_limit_in_bytes="900", memory_usage_in_bytes="300", memory_stat="total_inactive_file 0\n")
    assert available_bytes(tmp_path) == 600


def test_cores_are_the_least_quota_of_every_group_above(tmp_path: Path) -> None:
    groups = tmp_path / "sys/fs/cgroup"
    assert core_quota(tmp_path) == float("inf")
    # 1. version 2
    write(tmp_path / "proc/self", cgroup="0::/a/b\n7:cpu,cpuacct:/c\n")
    write(groups / "a/b", cpu_max="max 100000\n")
    assert core_quota(tmp_path) == float("inf")
    write(groups / "a", cpu_max="350000 100000\n")
    assert core_quota(tmp_path) == 3.5
    # 2. version 1, beside it
    write(groups / "cpu/c", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert core_quota(tmp_path) == 3.5
    write(groups / "cpu/c", cpu_cfs_quota_us="50000\n")
    assert core_quota(tmp_path) == 0.5


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (1e9, None), (float("inf"), None)])
def test_a_deployment_is_sized_by_what_the_groups_leave(
    quota: float, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "core_quota", lambda: quota)
    monkeypatch.setattr(facts, "available_bytes", lambda: 123)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert facts.read_machine() == facts.Machine(cores or 3, 123)
