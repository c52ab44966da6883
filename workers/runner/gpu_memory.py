"""KV blocks on a device, beside them blocks of host memory, and the copies that a plan wants, in the plan's order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import StartupError
from kvtransfer.probe import probe_area
from workers.core.plan import MemoryChange, StepPlan
from workers.runner.base import DeviceMemory, KvPool
from workers.runner.pool import allocate_pool, release_pages, touch_pages

RESERVED_BYTES = 1 << 30
"""Device memory that the automatic KV size leaves for recorded graphs and for what libraries take."""
_COPY_TRIALS = 8


def blocks_that_fit(utilization: float, block_bytes: int, device: torch.device) -> int:
    """KV blocks, behind weights and workspace, in this share of a GPU's memory. StartupError when there is none."""
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * utilization) - (total - free) - RESERVED_BYTES
    probe = probe_area(0, block_bytes).end
    blocks = room // block_bytes - probe
    if blocks < 1:
        raise StartupError(
            f"no room for KV: gpu_memory_utilization {utilization} of {total:,} bytes less {total - free:,} in use and "
            f"{RESERVED_BYTES:,} reserved leaves {max(room, 0):,}; raise gpu_memory_utilization or set kv_cache_bytes"
        )
    return blocks


class BlockMemory:
    """`blocks` uint8 [num_blocks, block_bytes] on the device, `host` uint8 [host_blocks, block_bytes], pinned beside a
    GPU. On a CPU both are ordinary memory that transports and tiers may use."""

    def __init__(self, num_blocks: int, host_blocks: int, block_bytes: int, device: torch.device) -> None:
        """Raises StartupError when there is too little memory."""
        self._on_gpu = device.type == "cuda"
        self._block_bytes = block_bytes
        lane_bytes, kv_bytes = probe_area(num_blocks, block_bytes).end * block_bytes, num_blocks * block_bytes
        host_bytes = host_blocks * block_bytes
        self.lane_pool: KvPool | DeviceMemory
        self.kv_pool: KvPool | DeviceMemory
        self.bytes: Tensor
        if self._on_gpu:
            try:
                self.bytes = torch.zeros(lane_bytes, dtype=torch.uint8, device=device)
                host = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=host_bytes > 0)
            except torch.OutOfMemoryError as error:
                raise StartupError(f"too little device memory for the KV pool of {lane_bytes:,} bytes") from error
            address, index = self.bytes.data_ptr(), self.bytes.device.index
            self.lane_pool = DeviceMemory(address, lane_bytes, index)
            self.kv_pool = DeviceMemory(address, kv_bytes, index)
            self.host_pool: KvPool = host.numpy()
            self._stream = torch.cuda.Stream(device)
        else:
            memory = allocate_pool(lane_bytes, host_bytes)
            self.lane_pool, self.kv_pool = memory, memory[:kv_bytes]
            self.bytes = torch.from_numpy(memory)
            self.host_pool = np.empty(host_bytes, np.uint8)
            host = torch.from_numpy(self.host_pool)
        self.lane_bytes, self.kv_bytes = lane_bytes, kv_bytes
        self.blocks = self.bytes[:kv_bytes].view(num_blocks, block_bytes)
        self.host = host.view(host_blocks, block_bytes)

    def move(self, plan: StepPlan) -> None:
        """What comes before the rows of a plan; ordered behind everything that was enqueued so far."""
        if plan.swap_out:
            self._copy_beside(self.blocks, self.host, plan.swap_out)
        if plan.memory:
            self._change(plan.memory)
        if plan.swap_in:
            self._copy_beside(self.host, self.blocks, plan.swap_in)
        for source, target in plan.copies:
            self.blocks[target].copy_(self.blocks[source])

    def _copy_beside(self, sources: Tensor, targets: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """On a stream of its own, which begins behind the compute stream's work and holds up its next: the copy engines
        work in both directions at once, and the host waits for nothing."""
        compute = torch.cuda.current_stream() if self._on_gpu else None
        if compute is not None:
            self._stream.wait_stream(compute)
        beside: Any = torch.cuda.stream(self._stream) if self._on_gpu else nullcontext()
        with beside:
            for source, target in pairs:
                targets[target].copy_(sources[source], non_blocking=True)
        if compute is not None:
            compute.wait_stream(self._stream)

    def _change(self, change: MemoryChange) -> None:
        """Pages go back to the system where it may take them; a GPU's memory and what is pinned for it stays."""
        if isinstance(self.kv_pool, DeviceMemory):
            return
        for memory, retired, restored in (
            (self.kv_pool, change.retired, change.restored),
            (self.host_pool, change.host_retired, change.host_restored),
        ):
            release_pages(memory, retired, self._block_bytes)
            touch_pages(memory, restored, self._block_bytes)

    def time_copies(self) -> float:
        """Median seconds to copy one block to the host or back; 0 without host blocks. Leaves blocks undefined."""
        took = []
        for trial in range(min(_COPY_TRIALS, len(self.blocks)) if len(self.host) else 0):
            device, host = self.blocks[trial], self.host[trial % len(self.host)]
            for target, source in ((host, device), (device, host)):
                target.copy_(source)  # a page's first touch is paid once, not by every copy
                begin = time.perf_counter()
                target.copy_(source)  # waits for the device
                took.append(time.perf_counter() - begin)
        return median(took) if took else 0.0
