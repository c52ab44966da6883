"""Judges what the machine and its container allow: namespaces, limits, shared memory, huge pages, GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config.units import format_bytes
from headrace.core.findings import Finding, fail, ok, warn

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""
UNLIMITED = -1
"""Of a resource limit."""
RAY_SHM_BYTES = 80 << 20
BASE_FILES = 256
FILES_A_WORKER = 64
MIN_HUGE_SHARE = 0.5
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class IsolationFacts:
    """Who may see, and read the memory of, whom."""

    in_cluster: bool
    namespace: str
    """As /proc/self/ns/pid has it."""
    init_namespace: str
    """That of process 1; "" where it may not be looked at."""
    namespace_pids: int
    """This process's ids, one a namespace, in the /proc that is mounted here."""
    ptrace_scope: int
    """0 where the kernel has no such restriction."""
    may_trace: bool
    """CAP_SYS_PTRACE."""


@dataclass(frozen=True, slots=True)
class MemlockFacts:
    limit_bytes: int
    is_exempt: bool
    """CAP_IPC_LOCK."""
    pool_bytes: int
    """The largest KV pool of a worker."""
    has_rdma: bool
    has_gpu: bool


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    size_bytes: int
    """0: there is no /dev/shm."""
    free_bytes: int
    is_writable: bool
    is_for_ray: bool
    """A private Ray cluster will be started here."""


@dataclass(frozen=True, slots=True)
class HugePageFacts:
    setting: str
    """always, madvise, never; "" where the kernel has none."""
    asked_bytes: int
    got_bytes: int
    """Huge pages in a mapping that was made as KV pools are, and touched."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    num_devices: int
    """NVIDIA devices whose files are here."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES."""
    torch_error: str = ""
    torch_names: tuple[str, ...] = ()
    without_peer_access: tuple[tuple[int, int], ...] = ()


def judge_isolation(facts: IsolationFacts) -> Finding:
    check = "PID namespace"
    found = "the machine's own" if facts.namespace == INITIAL_PID_NAMESPACE else f"a container's, {facts.namespace}"
    if facts.namespace_pids > 1 or facts.init_namespace not in ("", facts.namespace):
        return warn(
            check,
            f"{facts.namespace}, but /proc shows another one: processes cannot be found by their ids",
            "mount /proc in the namespace (unshare --mount-proc), or run without one",
        )
    if facts.ptrace_scope >= 2 and not facts.may_trace:
        return warn(
            check,
            f"{found}; ptrace_scope {facts.ptrace_scope}: workers may not read each other's memory",
            "sysctl kernel.yama.ptrace_scope=1, or give CAP_SYS_PTRACE",
        )
    if facts.in_cluster and facts.namespace != INITIAL_PID_NAMESPACE:
        return warn(
            check,
            f"{found}: UCX uses TCP to workers of this machine in other containers",
            "give the containers of a machine one PID and IPC namespace (--pid=host --ipc=host)",
        )
    return ok(check, found)


def judge_cores(num_threads: int, num_cores: int, quota: float, in_cluster: bool) -> Finding:
    """num_threads: compute threads of all workers. quota: cores' worth of time that the container has."""
    check = "cores"
    limit = f", of which the container may use {quota:g}" if quota < num_cores else ""
    found = f"{num_cores}{limit}, for {num_threads} compute thread(s)"
    if num_threads > min(num_cores, quota) and not in_cluster:
        return warn(check, found, "fewer workers or `threads`, or more cores: workers would wait for each other")
    return ok(check, found)


def judge_memlock(facts: MemlockFacts) -> Finding:
    check = "locked memory"
    pool = format_bytes(facts.pool_bytes)
    if facts.is_exempt or facts.limit_bytes == UNLIMITED:
        return ok(check, "no limit")
    found = f"{format_bytes(facts.limit_bytes)} a process, a KV pool is {pool}"
    if facts.limit_bytes >= facts.pool_bytes:
        return ok(check, found)
    advice = "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    if facts.has_rdma:
        return fail(check, f"{found}: it cannot be registered for RDMA", advice)
    if facts.has_gpu:
        return warn(check, f"{found}: it cannot be pinned for copies to a GPU", advice)
    return ok(check, f"{found}; nothing here needs it locked")


def judge_shared_memory(facts: SharedMemoryFacts) -> Finding:
    check = "/dev/shm"
    if not facts.size_bytes:
        return warn(check, "missing: nothing can be shared between processes", "mount a tmpfs there")
    found = f"{format_bytes(facts.free_bytes)} free of {format_bytes(facts.size_bytes)}"
    if not facts.is_writable:
        return warn(check, f"{found}, but it cannot be written", "mount it with mode 1777")
    if facts.is_for_ray and facts.free_bytes < RAY_SHM_BYTES:
        advice = "docker run --shm-size=1g, or remove what was left there"
        return warn(check, f"{found}: Ray wants {format_bytes(RAY_SHM_BYTES)}", advice)
    return ok(check, found)


def judge_huge_pages(facts: HugePageFacts) -> Finding:
    check = "huge pages"
    got = f"{format_bytes(facts.got_bytes)} of {format_bytes(facts.asked_bytes)} asked for"
    found = f"{facts.setting or 'not in this kernel'}: {got}"
    if facts.got_bytes >= MIN_HUGE_SHARE * facts.asked_bytes:
        return ok(check, found)
    if facts.setting == "never" or not facts.setting:
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    else:
        advice = "free or compact memory (echo 1 > /proc/sys/vm/compact_memory); check that no prctl forbids them"
    return warn(check, f"{found}; UCX reads ordinary pages up to three times slower", advice)


def judge_open_files(limit: int, num_requests: int, num_workers: int) -> Finding:
    """limit: of a process. num_requests: that a gateway lets in, each with a client's connection."""
    check = "open files"
    needed = num_requests + FILES_A_WORKER * num_workers + BASE_FILES
    if limit == UNLIMITED or limit >= needed:
        return ok(check, f"{'no limit' if limit == UNLIMITED else limit}, {needed} may be needed")
    return warn(
        check,
        f"{limit}; {num_requests} clients and {num_workers} workers may need {needed}",
        f"ulimit -n {needed}, or a lower gateway.limits.max_live_requests",
    )


def judge_allocator(environment: Mapping[str, str]) -> Finding:
    check = "CUDA allocator"
    for name in ALLOCATOR_VARIABLES:
        value = environment.get(name, "")
        options = [option.split(":") for option in value.lower().replace(" ", "").split(",")]
        if ["expandable_segments", "true"] in options:
            found = f"{name} has expandable_segments:True: UCX falls back to TCP without a word"
            return warn(check, found, f"take expandable_segments out of {name}")
    return ok(check, "no expandable segments")


def judge_gpus(facts: GpuFacts) -> Finding:
    check = "GPUs"
    if not facts.num_devices:
        return ok(check, "none: workers compute on CPU")
    found = f"{facts.num_devices} NVIDIA device(s)"
    if facts.visible is not None and facts.visible.strip() in ("", "-1"):
        return warn(check, f"{found}, hidden by CUDA_VISIBLE_DEVICES={facts.visible!r}", "unset CUDA_VISIBLE_DEVICES")
    if facts.torch_error or not facts.torch_names:
        reason = facts.torch_error or "torch sees none"
        return warn(check, f"{found}, but {reason}", "install torch's CUDA build, and a driver that fits it")
    found = f"torch sees {len(facts.torch_names)} of {facts.num_devices}: {', '.join(dict.fromkeys(facts.torch_names))}"
    if facts.without_peer_access:
        pairs = ", ".join(f"{one}-{other}" for one, other in facts.without_peer_access)
        advice = "check `nvidia-smi topo -m`, and IOMMU or ACS settings"
        return warn(check, f"{found}; no peer access between {pairs}: KV goes through the host", advice)
    return ok(check, found)
