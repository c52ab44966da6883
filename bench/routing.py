"""What the router costs its gateway: prefix look-ups on a trace, beside Dynamo's radix tree where that is installed;
a whole decision over 64 and 1,000 workers; taking in cache events; memory of the index.

Both indexes see the same requests in the same order, each stored at the same worker after it was looked up, and are
timed in turn on stretches of them. A look-up's result is read: depths by worker here, a dictionary of scores there.
"""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from headrace.core.records import CacheChange, Role, WorkerLoad
from headrace.core.step_shape import GENERIC_S
from router.core.decision import RouteAsk
from router.core.placement import WorkerKey
from router.core.prefix_index import PrefixIndex
from router.core.router import Router

STRETCH = 400
"""Requests between two looks at the clock."""


class _Index(Protocol):
    def store(self, worker: int, keys: list[int]) -> None: ...

    def look(self, keys: list[int]) -> object: ...


class _Ours:
    def __init__(self, num_workers: int) -> None:
        self.index = PrefixIndex()
        self._count = num_workers
        self._seq = [0] * num_workers
        for slot in range(num_workers):
            self.index.apply(slot, CacheChange(1, 0, 0, is_snapshot=True))

    def store(self, worker: int, keys: list[int]) -> None:
        seq = self._seq[worker] = self._seq[worker] + 1
        self.index.apply(worker, CacheChange(1, seq - 1, seq, tuple(keys)))

    def look(self, keys: list[int]) -> object:
        return self.index.lookup(keys, self._count)


class _OursUnread(_Ours):
    def look(self, keys: list[int]) -> object:
        return self.index.runs(keys)


class _Walk:
    """The plainest index: a set of workers for each key."""

    def __init__(self) -> None:
        self._held: dict[int, set[int]] = {}

    def store(self, worker: int, keys: list[int]) -> None:
        for key in keys:
            self._held.setdefault(key, set()).add(worker)

    def look(self, keys: list[int]) -> object:
        depths: dict[int, int] = {}
        going: set[int] | None = None
        for key in keys:
            have = self._held.get(key)
            going = (going & have if going is not None else have) if have else None
            if not going:
                break
            for worker in going:
                depths[worker] = depths.get(worker, 0) + 1
        return depths


class _Dynamo:
    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._events = 0

    def store(self, worker: int, keys: list[int]) -> None:
        self._events += 1
        blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
        event = {"event_id": self._events, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        self._tree.apply_event(worker, json.dumps(event).encode())

    def look(self, keys: list[int]) -> object:
        return self._tree.find_matches(keys).scores


class _DynamoUnread(_Dynamo):
    def look(self, keys: list[int]) -> object:
        return self._tree.find_matches(keys)


def _peer() -> Callable[[], Any] | None:
    try:
        from dynamo._core import RadixTree

        print(f"peer: ai-dynamo-runtime {version('ai-dynamo-runtime')}, RadixTree")
    except (ImportError, PackageNotFoundError):
        print("peer: skipped, since ai-dynamo-runtime is not installed (pip install --no-deps ai-dynamo-runtime)")
        return None
    return RadixTree  # type: ignore[no-any-return]


def _requests(path: Path, seed: int) -> list[list[int]]:
    """Each request's block keys, 64-bit ones in place of the trace's small numbers."""
    rng, keys = random.Random(seed), dict[int, int]()
    out = []
    with gzip.open(path) as lines:
        for line in lines:
            out.append([keys.setdefault(block, rng.getrandbits(64)) for block in json.loads(line)["hash_ids"]])
    return out


def _workers(requests: Sequence[list[int]], num_workers: int, kept: bool, seed: int) -> list[int]:
    """Where each request goes: by chance, or `kept` to the worker that has its second block, else the least filled."""
    rng = random.Random(seed)
    if not kept:
        return [rng.randrange(num_workers) for _ in requests]
    homes, filled, out = dict[int, int](), [0] * num_workers, []
    for keys in requests:
        home = homes.get(keys[1]) if len(keys) > 1 else None
        if home is None:
            home = filled.index(min(filled))
        filled[home] += len(keys)
        out.append(home)
        for key in keys[1:]:
            homes.setdefault(key, home)
    return out


def _rates(makers: dict[str, Callable[[], _Index]], requests: list[list[int]], workers: list[int]) -> None:
    """Prints look-ups a second on the second half of the requests, the indexes in turn on each stretch."""
    indexes = {name: make() for name, make in makers.items()}
    half = len(requests) // 2
    for keys, worker in zip(requests[:half], workers, strict=False):
        for index in indexes.values():
            index.store(worker, keys)
    rates: dict[str, list[float]] = {name: [] for name in indexes}
    for first in range(half, len(requests), STRETCH):
        stretch = requests[first : first + STRETCH]
        for name, index in indexes.items():
            look = index.look
            began = perf_counter()
            for keys in stretch:
                look(keys)
            rates[name].append(len(stretch) / (perf_counter() - began))
        for keys, worker in zip(stretch, workers[first:], strict=False):
            for index in indexes.values():
                index.store(worker, keys)
    for name, each in rates.items():
        each.sort()
        line = f"  {name:28} {median(each):9,.0f}/s  ({each[len(each) // 10]:,.0f} to {each[-len(each) // 10]:,.0f})"
        print(line, flush=True)


def _decisions(num_prefill: int, num_decode: int, holders: int, rounds: int, seed: int) -> None:
    """Prints the time of one whole choice, and of the late one of the decode worker, for a 32k-token prompt."""
    rng = random.Random(seed)
    router = Router(rng.random)
    keys = tuple(rng.getrandbits(64) for _ in range(2048))
    count = num_prefill + num_decode
    names = [WorkerKey(f"w{i}", "1") for i in range(count)]
    loads = []
    for at, name in enumerate(names):
        is_decode = at >= num_prefill
        load = WorkerLoad(
            queue_s=rng.random(),
            free_blocks=100,
            evictable_blocks=20_000,
            total_blocks=25_000,
            decode_rows=20 * is_decode,
            decode_context=40_000 * is_decode,
            expected_output_tokens=5_000 * is_decode,
            eviction_ms_per_block=0.3,
            step_costs=GENERIC_S,
        )
        loads.append(load)
        router.worker_up(name, Role.DECODE if is_decode else Role.PREFILL, 400_000, 16, node=str(at // 8))
        router.report(name, load)
    for at in rng.sample(range(count), holders):
        router.cache_changed(names[at], CacheChange(1, 0, 1, keys[: rng.randrange(2048)], is_snapshot=True))
    ask = RouteAsk("bench", 32_768, keys, 200, 200)
    times: dict[str, list[float]] = {"look-up alone": [], "choose": [], "choose_decode": [], "book and undo": []}
    for at in range(rounds):
        router.report(names[at % count], loads[at % count])
        began = perf_counter()
        router.index.lookup(keys, count)
        looked = perf_counter()
        decision = router.choose(ask, 0.0)
        chosen = perf_counter()
        assert decision is not None
        router.choose_decode(ask, decision.worker, 0.0)
        late = perf_counter()
        router.undo(decision.worker, router.book(decision, ask, 0.0))
        done = perf_counter()
        for name, took in zip(times, (looked - began, chosen - looked, late - chosen, done - late), strict=True):
            times[name].append(took * 1e3)
    for name, each in times.items():
        each.sort()
        spread = f"{each[len(each) // 10]:.3f} to {each[-len(each) // 10]:.3f}"
        print(f"  {name:28} {median(each):9.3f} ms ({spread})", flush=True)


def _ingestion(requests: list[list[int]], workers: list[int], num_workers: int) -> None:
    """Prints blocks a second and bytes for each, as the trace's blocks come and as they go."""
    changes = sum(map(len, requests))
    began = perf_counter()
    ours = _Ours(num_workers)
    for keys, worker in zip(requests, workers, strict=True):
        ours.store(worker, keys)
    stored = perf_counter()
    for slot in range(num_workers):
        seq = ours._seq[slot]
        ours.index.apply(slot, CacheChange(1, seq, seq + 1, removed=tuple(ours.index.keys_of(slot))))
    removed = perf_counter()
    print(f"  stored   {changes / (stored - began):12,.0f} blocks/s")
    tracemalloc.start()
    ours = _Ours(num_workers)
    before = tracemalloc.get_traced_memory()[0]
    for keys, worker in zip(requests, workers, strict=True):
        ours.store(worker, [key + 0 for key in keys])
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    entries, blocks = ours.index.entries, ours.index.num_blocks
    print(f"  removed  {entries / (removed - stored):12,.0f} blocks/s")
    told = f"`memory_bytes` says {ours.index.memory_bytes / 2**20:.1f}"
    print(f"  memory   {used / blocks:.0f} bytes a block, {used / entries:.0f} a (block, worker) pair:")
    print(f"           {used / 2**20:.1f} MiB for {blocks:,} blocks and {entries:,} pairs; {told}")


def run(trace: str, num_workers: int, rounds: int, seed: int) -> None:
    """See the module's docstring."""
    peer = _peer()
    path = Path(trace)
    if path.exists():
        requests = _requests(path, seed)
        mean = sum(map(len, requests)) / len(requests)
        for kept in (True, False):
            workers = _workers(requests, num_workers, kept, seed)
            where = "kept with their prefix" if kept else "sent by chance"
            print(f"look-ups: {len(requests):,} requests of {mean:.0f} blocks, {where}, {num_workers} workers")
            makers: dict[str, Callable[[], _Index]] = {"ours": lambda: _Ours(num_workers), "dictionary of sets": _Walk}
            if peer is not None:
                makers["Dynamo"] = lambda: _Dynamo(peer())
                makers["ours, result not laid out"] = lambda: _OursUnread(num_workers)
                makers["Dynamo, result not read"] = lambda: _DynamoUnread(peer())
            _rates(makers, requests, workers)
        print("cache events:")
        _ingestion(requests, workers, num_workers)
    else:
        print(f"look-ups and cache events: skipped, since there is no {path}")
    for prefill, decode, holders in ((32, 32, 8), (500, 500, 8), (500, 500, 100)):
        print(f"decision: 32k tokens (2,048 blocks), {prefill} prefill and {decode} decode workers, {holders} holders")
        _decisions(prefill, decode, holders, rounds, seed)
