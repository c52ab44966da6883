"""What a pool gives back is the system's: the process shrinks by it, and neighbouring blocks lose nothing."""

from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from kvtransfer.transports.base import allocate_pool
from tests.core_world import make_settings
from tests.model_fixtures import plan_of, tiny_model
from workers.core.blocks import BlockPool
from workers.core.plan import MemoryChange, StepPlan
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.core.watermarks import Level, Marks, Watermarks
from workers.runner.pool import is_pinned, release_pages, touch_pages
from workers.runner.torch_runner import TorchRunner

MIB = 1 << 20
NOISE_BYTES = 4 * MIB
"""What the rest of the process may take meanwhile."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("block_bytes", [1000, 46_080, 737_280])
def test_retired_blocks_leave_the_process_and_the_others_keep_their_bytes(block_bytes: int) -> None:
    num_blocks = 64 * MIB // block_bytes
    pool = allocate_pool(num_blocks * block_bytes)
    blocks = pool.reshape(num_blocks, block_bytes)
    blocks[:] = (np.arange(num_blocks) % 251 + 1).astype(np.uint8)[:, None]
    retired = [*range(num_blocks // 4, num_blocks)]
    before = resident_bytes()
    released = release_pages(pool, retired, block_bytes)
    assert len(retired) * block_bytes - 2 * mmap.PAGESIZE <= released <= len(retired) * block_bytes
    assert before - resident_bytes() >= released - NOISE_BYTES
    kept = num_blocks // 4
    assert (blocks[:kept] == (np.arange(kept) % 251 + 1).astype(np.uint8)[:, None]).all()
    touch_pages(pool, retired, block_bytes)
    assert resident_bytes() >= before - NOISE_BYTES


def test_a_single_block_gives_only_the_pages_that_are_all_its_own() -> None:
    block_bytes = mmap.PAGESIZE * 3 // 2
    pool = allocate_pool(8 * block_bytes)
    pool[:] = 7
    assert release_pages(pool, [1], block_bytes) == mmap.PAGESIZE
    assert release_pages(pool, [], block_bytes) == 0
    blocks = pool.reshape(8, block_bytes)
    assert (blocks[0] == 7).all()
    assert (blocks[2:] == 7).all()


def test_a_steps_retired_blocks_leave_the_runners_process_and_restored_ones_compute_as_ever(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    block_bytes = TorchRunner(folder, 64, num_blocks=4).layout.block_bytes
    num_blocks = 32 * MIB // block_bytes
    runner = TorchRunner(folder, 64, num_blocks=num_blocks, host_blocks=num_blocks)
    runner.warm_up()
    runner.host_pool[:] = 1
    step = plan_of([(0, [5, 6, 7], [num_blocks - 1])])
    token = runner.run(step).token_ids
    retired = list(range(1, num_blocks))
    gc.collect()
    before = resident_bytes()
    less = MemoryChange(retired=retired, host_retired=retired)
    assert runner.run(StepPlan(1, memory=less)).token_ids == []
    assert before - resident_bytes() >= 64 * MIB - NOISE_BYTES
    more = MemoryChange(restored=retired, host_restored=retired)
    assert runner.run(replace(step, memory=more)).token_ids == token
    assert resident_bytes() >= before - NOISE_BYTES


def serve(runner: TorchRunner, limit_bytes: list[int]) -> tuple[list[list[int]], list[int], list[int]]:
    """Outputs of six requests, with a look at the process's real memory after each step, one limit a step; and after
    each look how many blocks are out of use, and what the process has."""
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    scheduler = Scheduler(make_settings(block_size=16, max_model_len=64), pool, PrefixCache(pool))
    watermarks = Watermarks(Marks(low_bytes=8 * MIB, critical_bytes=4 * MIB))
    sampling = SamplingParams(30, ignore_eos=True)
    requests = [
        Request(RequestKey(i), RequestId(str(i)), 0, [5 + i, 6, 7 + i] * 6, sampling, b"r" * 16) for i in range(6)
    ]
    for request in requests:
        assert scheduler.submit(request, 0.0) is None
    retired, resident = [], []
    for second, limit in enumerate(limit_bytes):
        now = float(second)
        if (plan := scheduler.schedule(now)) is not None:
            scheduler.apply(plan, runner.run(plan), now)
        available = max(0, limit - resident_bytes())
        level, out = watermarks.look(available, now), pool.retired_blocks
        more = watermarks.missing_blocks(available, runner.layout.block_bytes, pool.num_blocks, out, now)
        scheduler.resize(out + more, shed=level is Level.SHED)
        scheduler.check_integrity()
        retired.append(out)
        resident.append(resident_bytes())
    assert watermarks.level is Level.OPEN
    return [request.output_ids for request in requests], retired, resident


def test_a_process_stays_within_a_limit_that_shrinks_under_load_and_takes_its_memory_back(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    block_bytes = TorchRunner(folder, 64, num_blocks=4).layout.block_bytes
    runner = TorchRunner(folder, 64, num_blocks=64 * MIB // block_bytes)
    runner.warm_up()
    roomy, tight = resident_bytes() + 100 * MIB, resident_bytes() - 30 * MIB
    outputs, retired, _ = serve(runner, [roomy] * 35)
    assert not any(retired)
    assert all(len(output) == 30 for output in outputs)
    again, retired, resident = serve(runner, [roomy] * 5 + [tight] * 20 + [roomy] * 60)
    assert again == outputs
    # What is available is never less than nothing, so that a look gives back 10 MiB at most.
    assert max(resident[10:25]) <= tight
    assert max(retired) * block_bytes > 30 * MIB
    assert retired[-1] == 0
    assert resident[-1] > tight + 20 * MIB


def test_ordinary_memory_is_not_pinned() -> None:
    assert not is_pinned()
