"""Engine, movers and real runner together: whatever tier gives a prefix back, the tokens are those of a run without any
cache. The pool is filled with NaN between requests that must not find anything there, so nothing is right by luck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest

from headrace.core.records import FinishReason
from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from tests.core_world import make_settings
from tests.model_fixtures import tiny_model
from workers.core.blocks import BlockPool
from workers.core.plan import StepEvents
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.disk_store import DiskStore
from workers.engine import Engine
from workers.movers import Movers
from workers.runner.torch_runner import TorchRunner

BLOCK, BLOCKS, HOST, DISK, MAX_LEN = 8, 24, 64, 64, 160
PREFIX = [3 + 7 * i % 500 for i in range(100)]
ROOT = b"r" * 16
OUTPUT = 6
FULL = (len(PREFIX) + OUTPUT - 1) // BLOCK
"""Blocks that a request for PREFIX fills."""


class Sink:
    def __init__(self) -> None:
        self.ended: dict[RequestKey, FinishReason] = {}
        self.changed = threading.Condition()

    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def refused(self, refusals: Sequence[tuple[RequestKey, str]]) -> None: ...

    def step_ended(self, events: StepEvents) -> None:
        with self.changed:
            self.ended |= dict(events.finished)
            self.changed.notify_all()


class Life:
    """A worker's life from start to stop."""

    def __init__(self, runner: TorchRunner, folder: Path, disk_blocks: int) -> None:
        self.runner = runner
        settings = make_settings(
            block_size=BLOCK, max_model_len=MAX_LEN, host_blocks=HOST, disk_blocks=disk_blocks, watermark_blocks=1
        )
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.scheduler = Scheduler(settings, self.pool, PrefixCache(self.pool))
        self.sink = Sink()
        self.engine = Engine(self.scheduler, runner, self.sink)
        store = DiskStore(folder, "w", runner.fingerprint(), runner.layout.block_bytes, disk_blocks)
        self.movers = Movers(self.scheduler, self.engine.lock, runner, store if disk_blocks else None)
        self._keys = count(1)

    def answer(self, prompt: list[int], *, no_cache: bool = False, tenant: str = "") -> Request:
        key = RequestKey(next(self._keys))
        sampling = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, temperature=0.9, seed=5)
        request = Request(key, RequestId(str(key)), 0, prompt, sampling, ROOT, no_cache=no_cache, tenant=tenant)
        with self.engine.lock:
            assert self.scheduler.submit(request, self.engine.now()) is None
            self.engine.wake()
        with self.sink.changed:
            assert self.sink.changed.wait_for(lambda: key in self.sink.ended, 30)
        return request

    def until(self, holds: Callable[[dict[str, int]], bool]) -> None:
        limit = time.monotonic() + 30
        while True:
            with self.engine.lock:
                if holds(self.scheduler.stats()):
                    return
            assert time.monotonic() < limit
            time.sleep(0.005)

    def settle(self, counter: str) -> None:
        """Until a counter stands still for a while."""
        seen, since = -1, time.monotonic()
        while time.monotonic() - since < 0.3:
            if (value := self.scheduler.stats()[counter]) != seen:
                seen, since = value, time.monotonic()
            time.sleep(0.02)

    def empty_device(self) -> None:
        """Every block of the device is given up, and nothing of it can be read any more."""
        with self.engine.lock:
            blocks = self.pool.alloc(self.pool.available_blocks)
            assert blocks is not None
            self.runner.kv_pool[:] = 0xFF
            self.pool.decref(blocks)

    def check(self) -> None:
        with self.engine.lock:
            self.scheduler.check_integrity()
            for tier in self.scheduler.tiering.accounts():
                assert tier.capacity == tier.cached + tier.used + tier.free


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    folder = tiny_model(tmp_path_factory.mktemp("tiers"))
    return TorchRunner(folder, MAX_LEN, block_size=BLOCK, num_blocks=BLOCKS, host_blocks=HOST, exact=True)


@contextmanager
def life(runner: TorchRunner, folder: Path, disk_blocks: int = DISK) -> Iterator[Life]:
    made = Life(runner, folder, disk_blocks)
    made.engine.start()
    made.movers.start()
    try:
        yield made
    finally:
        made.engine.stop()
        made.movers.stop()
    made.scheduler.check_integrity()
    assert not made.scheduler.requests


def alone(runner: TorchRunner, folder: Path, prompt: list[int]) -> list[int]:
    with life(runner, folder / "none", 0) as w:
        return w.answer(prompt, no_cache=True).output_ids


@pytest.mark.parametrize("length", [95, 96, 97])
def test_a_prefix_from_the_host_gives_the_same_tokens(runner: TorchRunner, tmp_path: Path, length: int) -> None:
    prompt = PREFIX[:length]
    expected = alone(runner, tmp_path, prompt)
    with life(runner, tmp_path, 0) as w:
        assert w.answer(prompt).output_ids == expected
        w.until(lambda stats: stats["offloads"] >= 12)
        w.empty_device()
        again = w.answer(prompt)
        assert again.output_ids == expected
        assert again.ledger.cached_tokens == (length - 1) // BLOCK * BLOCK
        assert w.scheduler.stats()["host_hit_tokens"] == again.ledger.cached_tokens
        w.check()


def test_a_prefix_from_disk_gives_the_same_tokens_after_a_restart(runner: TorchRunner, tmp_path: Path) -> None:
    expected = alone(runner, tmp_path, PREFIX)
    with life(runner, tmp_path) as w:
        assert w.answer(PREFIX).output_ids == expected
        w.until(lambda stats: stats["spills"] >= FULL)
    runner.kv_pool[:] = 0xFF
    runner.host_pool[:] = 0xFF
    with life(runner, tmp_path) as w:
        w.until(lambda stats: w.scheduler.tiering.tiers.disk_cached >= FULL)
        assert w.answer(PREFIX).output_ids == expected  # its reads race against a model of a few milliseconds
        w.until(lambda stats: stats["promotions"] >= 12)
        w.empty_device()
        again = w.answer(PREFIX)
        assert again.output_ids == expected
        assert again.ledger.cached_tokens == w.scheduler.stats()["disk_hit_tokens"] == 96
        w.check()


def test_damaged_files_are_misses(runner: TorchRunner, tmp_path: Path) -> None:
    expected = alone(runner, tmp_path, PREFIX)
    with life(runner, tmp_path) as w:
        w.answer(PREFIX)
        w.until(lambda stats: stats["spills"] >= FULL)
    rng = Random(1)
    for path in (p for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    with life(runner, tmp_path) as w:
        w.until(lambda stats: w.scheduler.tiering.tiers.disk_cached >= FULL)
        assert w.answer(PREFIX).output_ids == expected
        w.until(lambda stats: stats["disk_corrupt"] >= 1)
        assert w.scheduler.stats()["disk_hit_tokens"] == 0


def test_clearing_removes_a_tenants_files_and_no_others(runner: TorchRunner, tmp_path: Path) -> None:
    with life(runner, tmp_path) as w:
        w.answer(PREFIX, tenant="alice")
        w.answer([9, *PREFIX[:40]], tenant="bob")
        w.settle("spills")
        before = w.scheduler.stats()["spills"]
        with w.engine.lock:
            assert w.scheduler.tiering.by_tenant().keys() == {"alice", "bob"}
            w.scheduler.clear_cache("alice")
            assert w.scheduler.tiering.by_tenant().keys() == {"bob"}
        w.until(lambda stats: len([p for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"]) < before)
        w.check()
    assert len([p for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"]) == 5


def test_a_folder_that_cannot_be_used_turns_the_disk_off_and_serving_goes_on(
    runner: TorchRunner, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with life(runner, tmp_path / "file") as w:
        w.until(lambda stats: stats["disk_errors"] == 1)
        w.answer(PREFIX)
        w.until(lambda stats: stats["offloads"] >= 12)
        assert [tier.name for tier in w.scheduler.tiering.accounts()] == ["device", "host"]
        w.check()


@pytest.mark.parametrize("seed", range(3))
def test_many_prompts_through_a_small_device_are_answered_as_without_a_cache(
    runner: TorchRunner, tmp_path: Path, seed: int
) -> None:
    rng = Random(seed)
    stems = [[rng.randrange(3, 500) for _ in range(90)] for _ in range(3)]
    prompts = []
    for _ in range(24):
        tail = [rng.randrange(3, 6) for _ in range(rng.randint(1, 12))]
        prompts.append([*rng.choice(stems)[: rng.choice([15, 16, 17, 40, 88, 90])], *tail])
    with life(runner, tmp_path / "none", 0) as w:
        expected = [w.answer(prompt, no_cache=True).output_ids for prompt in prompts]
    with life(runner, tmp_path, 20) as w:
        for prompt, output in zip(prompts, expected, strict=True):
            assert w.answer(prompt).output_ids == output
            time.sleep(0.02)
        w.check()
        assert w.scheduler.stats()["offloads"] > 0
