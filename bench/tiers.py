"""What a prefix costs by where it is: time to first token of a prompt whose beginning is on the device, in the host, on
disk, or nowhere. The engine alone, without server and network.

Disk means after a restart: a new scheduler finds the files of the one before. The files were just written, so their
bytes come from the page cache, as they do for a worker that restarts on a machine with memory to spare.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

from headrace.ids import RequestId, RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from kvtransfer.core.identity import request_root
from workers.core.blocks import BlockPool
from workers.core.plan import StepEvents
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.core.settings import SchedulerSettings
from workers.disk_store import DiskStore
from workers.engine import Engine
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.movers import Movers
from workers.runner.torch_runner import TorchRunner

BLOCK = 16
PLACES = ("device", "host", "disk", "nowhere")
_PATIENCE_S = 60.0
_keys = count(1)


class _Sink:
    """Waits for first tokens."""

    def __init__(self) -> None:
        self.first = threading.Event()

    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def refused(self, refusals: Sequence[tuple[RequestKey, str]]) -> None: ...

    def step_ended(self, events: StepEvents) -> None:
        if events.token_ids:
            self.first.set()


@dataclass
class _Worker:
    """One life of a worker over a runner and a folder that outlive it."""

    runner: TorchRunner
    folder: Path

    def __post_init__(self) -> None:
        runner = self.runner
        self.settings = SchedulerSettings(
            max_num_batched_tokens=512,
            max_num_seqs=8,
            long_prefill_token_threshold=256,
            block_size=BLOCK,
            max_waiting_requests=8,
            max_waiting_tokens=1 << 20,
            watermark_blocks=1,
            max_model_len=runner.max_model_len,
            eos_token_ids=(),
            host_blocks=runner.host_blocks,
            host_copy_block_s=runner.host_copy_block_s,
            disk_blocks=runner.host_blocks,
        )
        self.pool = BlockPool(runner.num_blocks, BLOCK)
        self.scheduler = Scheduler(self.settings, self.pool, PrefixCache(self.pool))
        self.sink = _Sink()
        self.engine = Engine(self.scheduler, runner, self.sink)
        identity, block_bytes = runner.fingerprint(), runner.layout.block_bytes
        store = DiskStore(self.folder, "bench", identity, block_bytes, self.settings.disk_blocks)
        self.movers = Movers(self.scheduler, self.engine.lock, runner, store)
        self.engine.start()
        self.movers.start()

    def stop(self) -> None:
        self.engine.stop()
        self.movers.stop()

    def ttft(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds from submission to the first token, and how many tokens had not to be computed."""
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        root = request_root(self.runner.fingerprint(), b"bench")
        key = RequestKey(next(_keys))
        request = Request(key, RequestId(str(key)), 0, prompt, sampling, root)
        self.sink.first.clear()
        began = time.perf_counter()
        with self.engine.lock:
            assert self.scheduler.submit(request, time.monotonic()) is None
            self.engine.wake()
        assert self.sink.first.wait(_PATIENCE_S), "no first token"
        return time.perf_counter() - began, request.ledger.cached_tokens

    def wait_for(self, counter: str, least: int) -> None:
        limit = time.monotonic() + _PATIENCE_S
        while self.scheduler.stats()[counter] < least:
            assert time.monotonic() < limit, f"{counter} does not reach {least}"
            time.sleep(0.01)

    def empty_device(self) -> None:
        with self.engine.lock:
            blocks = self.pool.alloc(self.pool.available_blocks)
            assert blocks is not None
            self.pool.decref(blocks)


def run(prefix_tokens: int, rounds: int, threads: int, seed: int) -> None:
    """Prints medians and spread over `rounds` prompts."""
    rng = Random(seed)
    blocks = -(-prefix_tokens // BLOCK)
    runner = TorchRunner(
        prepare_model(DEFAULT_MODEL, cache_root()),
        prefix_tokens + 64,
        block_size=BLOCK,
        num_blocks=blocks + 16,
        host_blocks=2 * (blocks + 16),
        threads=threads,
    )
    runner.warm_up()
    took: dict[str, list[float]] = {place: [] for place in PLACES}
    cached: dict[str, int] = {}
    for _ in range(rounds):
        prefix = [rng.randrange(1000, 40_000) for _ in range(prefix_tokens)]

        def measure(place: str, worker: _Worker, prefix: list[int] = prefix) -> None:
            seconds, cached[place] = worker.ttft([*prefix, *(rng.randrange(1000, 40_000) for _ in range(8))])
            took[place].append(seconds)

        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            first = _Worker(runner, Path(folder))
            measure("nowhere", first)
            measure("device", first)
            first.wait_for("offloads", prefix_tokens // BLOCK)
            first.wait_for("spills", prefix_tokens // BLOCK)
            first.empty_device()
            measure("host", first)
            first.stop()
            second = _Worker(runner, Path(folder))
            time.sleep(0.5)  # the scan
            measure("disk", second)
            second.stop()
    mib = runner.layout.block_bytes / (1 << 20)
    print(
        f"\n{prefix_tokens} tokens shared, 8 more; {blocks} blocks of {mib:.2f} MiB; {rounds} rounds, {threads} threads"
    )
    print(f"copy of a block: {1e3 * runner.host_copy_block_s:.2f} ms")
    for place in PLACES:
        mid, least, most = median(took[place]), min(took[place]), max(took[place])
        share = mid / median(took["nowhere"])
        print(
            f"  {place:8} {1e3 * mid:8.0f} ms  ({1e3 * least:.0f}..{1e3 * most:.0f})  {share:5.2f} of computing it, "
            f"{cached[place]} tokens given"
        )
