"""Host memory of the real runner: its size, its part of the plan, its speed, and that a block comes back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StartupError
from tests.model_fixtures import plan_of, tiny_model
from workers.core.plan import StepPlan
from workers.runner import pool
from workers.runner.torch_runner import TorchRunner


def test_host_blocks_are_planned_timed_and_give_back_what_they_took(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    block_bytes = TorchRunner(folder, 64, num_blocks=4).layout.block_bytes
    runner = TorchRunner(folder, 64, num_blocks=4, swap_bytes=3 * block_bytes + 1)
    assert runner.host_blocks == 3
    assert runner.memory_plan()["host_kv"] == 3 * block_bytes
    runner.warm_up()
    assert 0.0 < runner.host_copy_block_s < 1.0
    blocks = runner.kv_pool.reshape(4, block_bytes)
    blocks[1] = np.arange(block_bytes, dtype=np.uint8)
    runner.run(StepPlan(0, swap_out=[(1, 2)]))
    blocks[1] = 0
    runner.run(replace(plan_of([(0, [5, 6, 7], [0])]), swap_in=[(2, 3)]))
    assert np.array_equal(blocks[3], np.arange(block_bytes, dtype=np.uint8))


def test_without_host_blocks_nothing_is_timed(tmp_path: Path) -> None:
    runner = TorchRunner(tiny_model(tmp_path), 64, num_blocks=4)
    runner.warm_up()
    assert (runner.host_blocks, runner.host_copy_block_s, runner.memory_plan()["host_kv"]) == (0, 0.0, 0)


def test_host_memory_counts_when_the_pool_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available_bytes", lambda: 200 << 20)
    pool.allocate_pool(1 << 20, 60 << 20)
    with pytest.raises(StartupError, match="1,048,576 bytes needed"):
        pool.allocate_pool(1 << 20, 80 << 20)
