"""The engine section: which device workers get, and what its memory has to do with the machine's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import ConfigError, Machine, facts, resolve
from cluster.config.schema import ServeConfig
from headrace.core.records import Role
from headrace.errors import StartupError
from tests.unit.cluster_builders import GIB, model
from workers.main import Worker, gpu_runner
from workers.runner.base import DeviceMemory
from workers.runner.fake import FakeRunner
from workers.spec import EngineOptions, WorkerSpec

TWO_GPUS = Machine(cores=2, available_bytes=22 * GIB, num_gpus=2)
CUDA = {"device": "cuda"}


def workers_of(config: Mapping[str, Any], machine: Machine) -> tuple[WorkerSpec, ...]:
    return resolve(ServeConfig.model_validate(config), model(), machine, lambda: "secret").workers


def spec(**changes: Any) -> WorkerSpec:
    given = {"worker_id": "w", "incarnation": "1", "role": Role.COLOCATED, "model_path": "/m", "max_model_len": 64}
    given |= {"threads": 1, "kv_cache_bytes": 0, "cluster_token": "token"}
    return WorkerSpec(**(given | changes))


@pytest.mark.parametrize(
    ("asked", "machine", "wanted"),
    [
        ("auto", TWO_GPUS, "cpu"),
        ("auto", Machine(2, 22 * GIB), "cpu"),
        ("cpu", TWO_GPUS, "cpu"),
        ("cuda", Machine(2, 22 * GIB), "cuda"),
    ],
)
def test_a_gpu_is_asked_for_by_name(asked: str, machine: Machine, wanted: str) -> None:
    config = {"engine": {"device": asked}}
    assert {worker.engine.device for worker in workers_of(config, machine)} == {wanted}


def test_a_gpus_kv_is_what_the_device_has_left_or_whole_blocks_in_halves() -> None:
    auto = workers_of({"engine": CUDA}, TWO_GPUS)[0]
    assert (auto.kv_cache_bytes, auto.swap_bytes, auto.max_model_len) == (0, 0, 8192)
    block_bytes = model().kv_bytes_per_token // 2 * 16
    pools = [{"role": "colocated", "kv_cache_bytes": 9000 // 16 * block_bytes + 1}]
    explicit = workers_of({"pools": pools, "engine": CUDA | {"gpu_memory_utilization": 0.5}}, TWO_GPUS)[0]
    assert explicit.kv_cache_bytes == 9000 // 16 * block_bytes
    assert explicit.engine.gpu_memory_utilization == 0.5
    wide = workers_of({"pools": pools, "engine": CUDA, "model": {"dtype": "float32"}}, TWO_GPUS)[0]
    assert wide.kv_cache_bytes == 9000 // 16 // 2 * 2 * block_bytes
    assert workers_of({}, Machine(2, 22 * GIB))[0].kv_cache_bytes > 0


def test_weights_on_a_gpu_take_none_of_the_machines_memory() -> None:
    small = Machine(cores=2, available_bytes=GIB, num_gpus=1)
    assert len(workers_of({"engine": CUDA}, small)) == 2
    with pytest.raises(StartupError, match="not enough memory"):
        workers_of({"engine": {"device": "cpu"}}, small)


def test_what_a_gpu_does_not_have_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"pools.0.kv_cache_fraction.*gpu_memory_utilization"):
        workers_of({"pools": [{"role": "colocated", "kv_cache_fraction": 0.5}], "engine": CUDA}, TWO_GPUS)
    with pytest.raises(ValidationError, match="batch_invariant"):
        ServeConfig.model_validate({"exact": True, "engine": {"device": "cuda"}})
    with pytest.raises(StartupError, match="exact needs"):
        gpu_runner(spec(exact=True, engine=EngineOptions(device="cuda")))


def test_a_machine_without_nvidias_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "NVIDIA_CONTROL", tmp_path / "nvidiactl")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert facts.count_gpus() == 0


def test_a_worker_whose_kv_no_lane_can_read_does_not_start() -> None:
    runner = FakeRunner()
    runner.lane_pool = DeviceMemory(1 << 40, 1 << 20, 0)
    with pytest.raises(StartupError, match="no lane"):
        asyncio.run(Worker(spec(), lambda _: runner).start())
