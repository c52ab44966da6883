"""Gathers what `cluster.core.doctor.machine` judges, from /proc, /sys and this process."""

from __future__ import annotations

import json
import mmap
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from cluster.core.doctor.lanes import NetworkFacts
from cluster.core.doctor.machine import (
    UNLIMITED,
    GpuFacts,
    HugePageFacts,
    IsolationFacts,
    MemlockFacts,
    SharedMemoryFacts,
)
from headrace.installation import child_environment
from kvtransfer.transports.base import HUGE_PAGE_BYTES, allocate_pool

_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
"""Bits of a capability set (include/uapi/linux/capability.h)."""
_HUGE_PAGES = 8
_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_DEVICES = Path("/dev")


def read_isolation(in_cluster: bool) -> IsolationFacts:
    status = _status()
    return IsolationFacts(
        in_cluster=in_cluster,
        namespace=os.readlink("/proc/self/ns/pid"),
        init_namespace=_link("/proc/1/ns/pid"),
        namespace_pids=len(status.get("NSpid", "1").split()),
        ptrace_scope=int(_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or 0),
        may_trace=_has_capability(status, _CAP_SYS_PTRACE),
    )


def read_memlock(pool_bytes: int) -> MemlockFacts:
    return MemlockFacts(
        limit_bytes=_limit(resource.RLIMIT_MEMLOCK),
        is_exempt=_has_capability(_status(), _CAP_IPC_LOCK),
        pool_bytes=pool_bytes,
        has_rdma=bool(_names(_INFINIBAND)),
        has_gpu=_num_gpus() > 0,
    )


def read_open_files() -> int:
    return _limit(resource.RLIMIT_NOFILE)


def read_shared_memory(is_for_ray: bool) -> SharedMemoryFacts:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return SharedMemoryFacts(0, 0, False, is_for_ray)
    stat = os.statvfs(path)
    return SharedMemoryFacts(
        size_bytes=stat.f_blocks * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
        is_writable=os.access(path, os.W_OK | os.X_OK),
        is_for_ray=is_for_ray,
    )


def read_huge_pages() -> HugePageFacts:
    setting = re.search(r"\[(\w+)\]", _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    asked = _HUGE_PAGES * HUGE_PAGE_BYTES
    pool = allocate_pool(asked)
    pool[:: mmap.PAGESIZE] = 1  # pages come when they are touched
    return HugePageFacts(setting[1] if setting else "", asked, _huge_bytes(pool.ctypes.data, asked))


def read_network(in_cluster: bool) -> NetworkFacts:
    speeds = {}
    for name in _names(_NET):
        # The kernel answers with an error, or -1, where a card is down or has no speed.
        speed = _text(_NET / name / "speed")
        if name != "lo" and speed.isdigit() and int(speed) and _text(_NET / name / "operstate") == "up":
            speeds[name] = int(speed)
    return NetworkFacts(in_cluster, speeds, tuple(_names(_INFINIBAND)))


def read_gpus(limit_s: float) -> GpuFacts:
    """Asks torch, in a process of its own, where there is a device."""
    num_devices, visible = _num_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not num_devices:
        return GpuFacts(0, visible)
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "workers.runner.gpus"],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=True,
        )
        told = json.loads(answer.stdout)
    except subprocess.TimeoutExpired:
        return GpuFacts(num_devices, visible, torch_error=f"torch gave no answer within {limit_s:g} s")
    except (subprocess.CalledProcessError, ValueError, OSError) as error:
        return GpuFacts(num_devices, visible, torch_error=f"torch cannot be asked: {type(error).__name__}")
    pairs = tuple((one, other) for one, other in told["without_peer_access"])
    return GpuFacts(num_devices, visible, torch_names=tuple(told["names"]), without_peer_access=pairs)


def _huge_bytes(address: int, num_bytes: int) -> int:
    """In huge pages of the mappings between these addresses. The kernel may have merged a mapping with its neighbours:
    what it counts is at most all that was asked for."""
    found = 0
    inside = False
    for line in _text(Path("/proc/self/smaps")).splitlines():
        borders = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if borders:
            inside = int(borders[1], 16) < address + num_bytes and int(borders[2], 16) > address
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return min(found, num_bytes)


def _num_gpus() -> int:
    return sum(1 for name in _names(_DEVICES) if re.fullmatch(r"nvidia\d+", name))


def _status() -> dict[str, str]:
    lines = _text(Path("/proc/self/status")).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _has_capability(status: dict[str, str], bit: int) -> bool:
    return bool(int(status.get("CapEff", "0"), 16) >> bit & 1)


def _limit(kind: int) -> int:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
