"""The bare engine of one worker, without any server: decode steps at several widths, prefill, whole bursts.

Beside it, in turn: the machine's own limits (memory read, fused multiply-adds), llama.cpp's bare engine in an
interpreter of its own, and the same bursts over HTTP at a running deployment.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.load import burst, model_of
from bench.walls import fma_gflops, read_gbytes
from headrace.ids import RequestId, RequestKey
from headrace.paths import cache_root
from headrace.sampling import SamplingParams
from workers.core.blocks import BlockPool
from workers.core.plan import StepEvents, StepPlan
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Request
from workers.core.scheduler import Scheduler
from workers.engine import Engine
from workers.main import scheduler_settings
from workers.model.prepare import DEFAULT_MODEL, prepare_model
from workers.runner.base import Runner
from workers.spec import WorkerSpec

PEER = Path(__file__).parent / "peers" / "llama_cpp_engine.py"
CONTEXT, STEPS = 64, 32
"""A decode trial: prompts of CONTEXT tokens, then STEPS steps that are measured; its figure is their median."""


class _Silent:
    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def step_ended(self, events: StepEvents) -> None: ...


class Bench:
    """One runner as `workers.main` builds it, driven by hand."""

    def __init__(self, runner: Runner, spec: WorkerSpec) -> None:
        self._runner = runner
        self._spec = spec
        self._random = random.Random(0)
        self._keys = 0

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(100, 40000) for _ in range(count)]

    def decode(self, rows: int) -> float:
        """Tokens a second."""
        each = self._runner.layout.blocks_for(CONTEXT + STEPS)
        tables = [list(range(i * each, (i + 1) * each)) for i in range(rows)]
        spent = []
        for step in range(STEPS):
            plan = self._plan(rows, 1, CONTEXT + step, tables)
            began = time.perf_counter()
            self._runner.run(plan)
            spent.append(time.perf_counter() - began)
        return rows / statistics.median(spent)

    def prefill(self, tokens: int) -> float:
        """Tokens a second of one prompt in chunks of the step's budget."""
        table = list(range(self._runner.layout.blocks_for(tokens)))
        budget = self._spec.max_num_batched_tokens
        began = time.perf_counter()
        for first in range(0, tokens, budget):
            count = min(budget, tokens - first)
            plan = self._plan(1, count, first, [table])
            plan.samples[0] = first + count == tokens
            self._runner.run(plan)
        return tokens / (time.perf_counter() - began)

    def burst(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Output tokens a second of a whole burst through scheduler and engine."""
        pool = BlockPool(self._runner.num_blocks, self._spec.block_size)
        scheduler = Scheduler(scheduler_settings(self._spec, self._runner), pool, PrefixCache(pool))
        engine = Engine(scheduler, self._runner, _Silent())
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        for prompt in prompts:
            self._keys += 1
            name = RequestId(str(self._keys))
            scheduler.submit(Request(RequestKey(self._keys), name, 1, list(prompt), sampling, b"bench"), engine.now())
        while engine.step():
            pass
        return len(prompts) * max_tokens / (time.perf_counter() - began)

    def _plan(self, rows: int, count: int, start: int, tables: list[list[int]]) -> StepPlan:
        sampling = SamplingParams(max_tokens=STEPS + 1)
        return StepPlan(
            0,
            [RequestKey(i) for i in range(rows)],
            [count] * rows,
            [start] * rows,
            self.ids(rows * count),
            tables,
            [True] * rows,
            [sampling] * rows,
            [()] * rows,
        )


class Peer:
    """llama.cpp's engine in its own interpreter."""

    def __init__(self, python: str, gguf: Path, storage: str, kv: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, PEER, gguf, "--storage", storage, "--kv", kv, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise SystemExit(f"{python} {PEER} did not start; it needs llama-cpp-python")

    def decode(self, rows: int) -> float:
        return rows / statistics.median(self._ask(f"decode {rows} {CONTEXT} {STEPS}"))

    def prefill(self, tokens: int) -> float:
        return tokens / self._ask(f"prefill {tokens}")[0]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, request: str) -> list[float]:
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        return [float(seconds) for seconds in json.loads(self._line())]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True, slots=True)
class Trial:
    """One line of the table: what is measured here and, where there is one, at the peer."""

    name: str
    ours: Callable[[], float]
    peer: Callable[[], float] | None = None
    peer_name: str = ""


def run(
    *,
    threads: int,
    dtype: str,
    rows: Sequence[int],
    prefill: int,
    rounds: int,
    peer_python: str | None,
    peer_storage: str,
    peer_kv: str,
    http: str | None,
) -> None:
    """Prints a line a trial: median, spread, and the median of the ratios paired round by round."""
    from workers.main import torch_runner

    folder = prepare_model(DEFAULT_MODEL, cache_root())
    spec = WorkerSpec.model_validate(
        {
            "worker_id": "bench",
            "incarnation": "0",
            "role": "colocated",
            "model_path": str(folder),
            "max_model_len": 4096,
            "threads": threads,
            "kv_cache_bytes": 1 << 30,
            "cluster_token": "",
            "weight_format": dtype,
        }
    )
    bench = Bench(torch_runner(spec), spec)
    peer = None
    if peer_python:
        from workers.model.prepare import default_gguf

        peer = Peer(peer_python, default_gguf(), peer_storage, peer_kv, threads)
    trials = [
        Trial(f"decode {n} rows", lambda n=n: bench.decode(n), peer and (lambda n=n: peer.decode(n)), "llama.cpp")  # type: ignore[misc]
        for n in rows
    ]
    trials.append(
        Trial(
            f"prefill {prefill}", lambda: bench.prefill(prefill), peer and (lambda: peer.prefill(prefill)), "llama.cpp"
        )
    )
    for n in rows if http else ():
        prompts = [bench.ids(64) for _ in range(n)]
        trials.append(
            Trial(
                f"burst {n} x 64/64",
                lambda p=prompts: bench.burst(p, 64),  # type: ignore[misc]
                lambda n=n: burst(http, model_of(http), [bench.ids(64) for _ in range(n)], 64).tokens_per_s,  # type: ignore[misc]
                "HTTP",
            )
        )
    try:
        for trial in trials:
            _measure(trial, rounds, threads)
    finally:
        if peer is not None:
            peer.close()


def _measure(trial: Trial, rounds: int, threads: int) -> None:
    ours, theirs, reads, fmas = [], [], [], []
    for turn in range(rounds + 1):
        if trial.peer and turn % 2:
            two, one = trial.peer(), trial.ours()
        else:
            one = trial.ours()
            two = trial.peer() if trial.peer else one
        if turn:  # the first round warms up
            ours.append(one)
            theirs.append(two)
            reads.append(read_gbytes(threads))
            fmas.append(fma_gflops(threads))
    line = f"{trial.name:18s} {statistics.median(ours):7.1f} tok/s ({min(ours):.1f}-{max(ours):.1f})"
    if trial.peer:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        line += f"   {trial.peer_name} {statistics.median(theirs):7.1f} ({min(theirs):.1f}-{max(theirs):.1f})"
        line += f"   ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(f"{line}   walls {statistics.median(reads):.1f} GB/s {statistics.median(fmas):.0f} GFLOP/s", flush=True)
