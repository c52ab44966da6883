"""A closed set of requests through scheduler, engine and runner, without any server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.ids import RequestId, RequestKey
from headrace.sampling import SamplingParams
from workers.core.blocks import BlockPool
from workers.core.plan import StepEvents
from workers.core.prefix_cache import PrefixCache
from workers.core.request import Keep, Request
from workers.core.scheduler import Scheduler
from workers.core.settings import SchedulerSettings
from workers.engine import Engine
from workers.runner.gpu_runner import GpuRunner


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Served:
    seconds: float
    steps: int
    output_tokens: int


class _Sink:
    def __init__(self) -> None:
        self.output_tokens = 0
        self.refusals: list[str] = []

    def step_began(self, keys: Sequence[RequestKey]) -> None: ...

    def step_ended(self, events: StepEvents) -> None:
        self.output_tokens += len(events.token_ids)

    def refused(self, refusals: Sequence[tuple[RequestKey, str]]) -> None:
        self.refusals += [reason for _, reason in refusals]

    def paused(self, paused: Sequence[tuple[RequestKey, Keep]]) -> None: ...


def serve(runner: GpuRunner, arrivals: Sequence[Arrival], *, most_rows: int, overlap: bool = True) -> Served:
    """All are there at the beginning; `most_rows` compute at a time. Raises RuntimeError when one is refused."""
    settings = SchedulerSettings(
        max_num_batched_tokens=runner.max_batched_tokens,
        max_num_seqs=most_rows,
        long_prefill_token_threshold=runner.max_batched_tokens,
        block_size=runner.layout.block_size,
        max_waiting_requests=len(arrivals),
        max_waiting_tokens=1 << 40,
        watermark_blocks=max(1, runner.num_blocks // 100),
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
    )
    pool = BlockPool(runner.num_blocks, runner.layout.block_size)
    scheduler, sink = Scheduler(settings, pool, PrefixCache(pool)), _Sink()
    engine = Engine(scheduler, runner, sink, overlap="auto" if overlap else "off")
    for number, arrival in enumerate(arrivals):
        many = arrival.num_output
        params = SamplingParams(max_tokens=many, min_tokens=many, ignore_eos=True, temperature=0.0)
        request = Request(RequestKey(number), RequestId(str(number)), 1, list(arrival.prompt), params, b"bench")
        scheduler.submit(request, engine.now())
    began = time.perf_counter()
    while engine.step():
        pass
    seconds = time.perf_counter() - began
    if sink.refusals:
        raise RuntimeError(f"{len(sink.refusals)} requests were refused: {sink.refusals[0]}")
    return Served(seconds, engine.steps, sink.output_tokens)
