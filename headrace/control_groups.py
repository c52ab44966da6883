"""What the machine and this process's control groups, of either version and up to the root, leave it: memory, cores.

The least of them counts. `root`: of the file system.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and what of it can be dropped: names in versions 2 and 1 of control groups."""
_NO_LIMIT = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of MemAvailable and the room in its memory control group and in
    those above it."""
    limits = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    for group in _groups("memory", root):
        for limit, used, cache in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                top = int((group / limit).read_text())
                if top >= _NO_LIMIT:
                    continue  # what else is to be read takes the kernel a millisecond
                room = top - int((group / used).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                limits.append(room + int(stat.get(cache, 0)))
    return max(0, min(limits)) if limits else 1 << 62


def core_quota(root: Path = Path("/")) -> float:
    """Cores whose time this process may take; inf: no group has a limit."""
    quotas = [float("inf")]
    for group in _groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            quota_us, period_us = map(int, (group / "cpu.max").read_text().split())
            quotas.append(quota_us / period_us)
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((group / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                quotas.append(quota_us / int((group / "cpu.cfs_period_us").read_text()))
    return min(quotas)


def _groups(kind: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process's `kind` counts in; some may not be visible."""
    lines = ["0::/"]
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds or kind in kinds.split(","):
            group = Path(path.lstrip("/"))
            top = root / "sys/fs/cgroup" / (kind if kinds else "")
            yield from (top / part for part in (group, *group.parents))
