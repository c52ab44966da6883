"""What the doctor says of a machine and its container: each wrong state has its line and says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.core.doctor.machine import (
    INITIAL_PID_NAMESPACE,
    UNLIMITED,
    GpuFacts,
    HugePageFacts,
    IsolationFacts,
    MemlockFacts,
    SharedMemoryFacts,
    judge_allocator,
    judge_cores,
    judge_gpus,
    judge_huge_pages,
    judge_isolation,
    judge_memlock,
    judge_open_files,
    judge_shared_memory,
)
from headrace.core.findings import Finding, Level

MIB, GIB = 1 << 20, 1 << 30
ISOLATION = IsolationFacts(False, INITIAL_PID_NAMESPACE, INITIAL_PID_NAMESPACE, 1, ptrace_scope=1, may_trace=False)
CONTAINER = replace(ISOLATION, namespace="pid:[7]", init_namespace="pid:[7]")
MEMLOCK = MemlockFacts(8 * MIB, is_exempt=False, pool_bytes=GIB, has_rdma=False, has_gpu=False)
SHM = SharedMemoryFacts(8 * GIB, 8 * GIB, is_writable=True, is_for_ray=True)
HUGE = HugePageFacts("madvise", asked_bytes=16 * MIB, got_bytes=16 * MIB)
GPUS = GpuFacts(2, None, torch_names=("NVIDIA H200", "NVIDIA H200"))

CASES = [
    (judge_isolation(ISOLATION), Level.OK, "the machine's own"),
    (judge_isolation(replace(ISOLATION, init_namespace="")), Level.OK, "the machine's own"),
    (judge_isolation(CONTAINER), Level.OK, "a container's"),
    (judge_isolation(replace(CONTAINER, in_cluster=True)), Level.WARN, "UCX uses TCP to workers"),
    (judge_isolation(replace(CONTAINER, init_namespace=INITIAL_PID_NAMESPACE)), Level.WARN, "/proc shows another one"),
    (judge_isolation(replace(CONTAINER, namespace_pids=2)), Level.WARN, "/proc shows another one"),
    (judge_isolation(replace(ISOLATION, ptrace_scope=2)), Level.WARN, "may not read each other's memory"),
    (judge_isolation(replace(ISOLATION, ptrace_scope=3, may_trace=True)), Level.OK, "the machine's own"),
    (judge_cores(2, 2, float("inf"), in_cluster=False), Level.OK, "2, for 2"),
    (judge_cores(8, 16, 4.0, in_cluster=False), Level.WARN, "of which the container may use 4"),
    (judge_cores(8, 4, float("inf"), in_cluster=False), Level.WARN, "4, for 8"),
    (judge_cores(8, 4, float("inf"), in_cluster=True), Level.OK, "4, for 8"),
    (judge_memlock(MEMLOCK), Level.OK, "nothing here needs it locked"),
    (judge_memlock(replace(MEMLOCK, has_rdma=True)), Level.FAIL, "8.0 MiB a process, a KV pool is 1.0 GiB"),
    (judge_memlock(replace(MEMLOCK, has_gpu=True)), Level.WARN, "cannot be pinned"),
    (judge_memlock(replace(MEMLOCK, has_rdma=True, is_exempt=True)), Level.OK, "no limit"),
    (judge_memlock(replace(MEMLOCK, has_rdma=True, limit_bytes=UNLIMITED)), Level.OK, "no limit"),
    (judge_memlock(replace(MEMLOCK, has_rdma=True, limit_bytes=GIB)), Level.OK, "1.0 GiB a process"),
    (judge_shared_memory(SHM), Level.OK, "8.0 GiB free"),
    (judge_shared_memory(replace(SHM, size_bytes=0)), Level.WARN, "missing"),
    (judge_shared_memory(replace(SHM, is_writable=False)), Level.WARN, "cannot be written"),
    (judge_shared_memory(replace(SHM, free_bytes=64 * MIB)), Level.WARN, "Ray wants 80.0 MiB"),
    (judge_shared_memory(replace(SHM, free_bytes=64 * MIB, is_for_ray=False)), Level.OK, "64.0 MiB free"),
    (judge_huge_pages(HUGE), Level.OK, "madvise: 16.0 MiB"),
    (judge_huge_pages(replace(HUGE, setting="never", got_bytes=0)), Level.WARN, "up to three times slower"),
    (judge_huge_pages(replace(HUGE, setting="", got_bytes=0)), Level.WARN, "not in this kernel"),
    (judge_huge_pages(replace(HUGE, got_bytes=2 * MIB)), Level.WARN, "2.0 MiB of 16.0 MiB"),
    (judge_open_files(20_000, 1024, 2), Level.OK, "20000"),
    (judge_open_files(UNLIMITED, 1024, 2), Level.OK, "no limit"),
    (judge_open_files(1024, 1024, 2), Level.WARN, "1024 clients and 2 workers may need 1408"),
    (judge_allocator({}), Level.OK, "no expandable segments"),
    (judge_allocator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}), Level.OK, "no expandable segments"),
    (
        judge_allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}),
        Level.WARN,
        "UCX falls back to TCP without a word",
    ),
    (judge_allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}), Level.WARN, "PYTORCH_ALLOC_CONF"),
    (judge_gpus(GpuFacts(0, None)), Level.OK, "none"),
    (judge_gpus(GPUS), Level.OK, "torch sees 2 of 2: NVIDIA H200"),
    (judge_gpus(replace(GPUS, visible="")), Level.WARN, "hidden by CUDA_VISIBLE_DEVICES"),
    (judge_gpus(replace(GPUS, torch_names=())), Level.WARN, "torch sees none"),
    (judge_gpus(replace(GPUS, torch_names=(), torch_error="no answer")), Level.WARN, "no answer"),
    (judge_gpus(replace(GPUS, without_peer_access=((0, 1),))), Level.WARN, "no peer access between 0-1"),
]


@pytest.mark.parametrize(("finding", "level", "says"), CASES, ids=[f"{case[0].check}: {case[2]}" for case in CASES])
def test_each_state_of_a_machine_has_its_line(finding: Finding, level: Level, says: str) -> None:
    assert finding.level is level
    assert says in finding.found
    assert bool(finding.advice) == (level is not Level.OK)
