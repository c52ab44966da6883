"""A whole model with random weights: decode steps against the time that its bytes take at the run's read bandwidth,
prefill against the run's matrix products, and how long the device waits for the host over thousands of steps.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch

from bench.gpu.clock import Walls
from bench.gpu.serve import Arrival, serve
from bench.gpu.shapes import model_folder
from headrace.ids import RequestKey
from headrace.sampling import SamplingParams
from workers.core.plan import StepPlan
from workers.runner.gpu_runner import GpuRunner

STEPS, WARM = 64, 8
SAMPLED = SamplingParams(max_tokens=1 << 20, ignore_eos=True, temperature=0.8, top_p=0.95, seed=1)
GREEDY = SamplingParams(max_tokens=1 << 20, ignore_eos=True, temperature=0.0)


@dataclass(slots=True)
class Step:
    """`wall_s`: what the bytes, or the operations, take at the run's best rate."""

    name: str
    median_s: float
    wall_s: float
    target: float | None = None
    steps_s: list[float] = field(default_factory=list)
    """Each one: what the predictor and the simulator are calibrated with."""

    @property
    def share(self) -> float:
        return self.wall_s / self.median_s

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.share >= self.target

    def line(self) -> str:
        mark = {None: "", True: "  met", False: "  MISSED"}[self.met]
        wanted = "" if self.target is None else f" (wanted {self.target})"
        return f"{self.name:56} {self.median_s * 1e3:9.3f} ms  {self.share:5.2f} of its wall{wanted}{mark}"


def open_model(name: str, folder: Path, device: str, *, tokens: int, seqs: int, length: int) -> GpuRunner:
    runner = GpuRunner(
        model_folder(name, folder),
        length,
        device=device,
        load_format="dummy",
        max_batched_tokens=tokens,
        max_seqs=seqs,
        num_blocks=None if device == "cuda" else 512,
        use_triton=device == "cuda",
    )
    runner.warm_up()
    return runner


def bytes_a_token(runner: GpuRunner) -> int:
    """Of KV."""
    return runner.layout.block_bytes // runner.layout.block_size


def decode(runner: GpuRunner, name: str, batch: int, context: int, params: SamplingParams, walls: Walls) -> Step:
    """Steps that are fed by the one before, two under way, so that the host hides what it can."""
    each = runner.layout.blocks_for(context + STEPS + WARM + 1)
    blocks = random.Random(5).sample(range(runner.num_blocks), batch * each)
    tables = [blocks[i * each : (i + 1) * each] for i in range(batch)]
    runner.submit(decode_plan(tables, context, [0] * batch, params))
    ends = [time.perf_counter()]
    for step in range(1, STEPS + WARM):
        runner.submit(decode_plan(tables, context + step, [-1 - row for row in range(batch)], params))
        runner.collect()
        ends.append(time.perf_counter())
    runner.collect()
    took = [after - before for before, after in zip(ends[WARM:], ends[WARM + 1 :], strict=False)]
    read = runner.read_bytes + batch * (context + STEPS // 2) * bytes_a_token(runner)
    kind = "greedy" if params is GREEDY else "sampled"
    return Step(f"{name} decode {batch} x {context}, {kind}", statistics.median(took), read / walls.read, None, took)


def decode_plan(tables: list[list[int]], position: int, token_ids: list[int], params: SamplingParams) -> StepPlan:
    rows = len(tables)
    return StepPlan(
        0,
        [RequestKey(i) for i in range(rows)],
        [1] * rows,
        [position] * rows,
        token_ids,
        list(tables),
        [True] * rows,
        [params] * rows,
        [()] * rows,
        [None] * rows,
        [position] * rows,
        num_decode_rows=rows,
    )


def prefill(runner: GpuRunner, name: str, tokens: int, walls: Walls, trials: int = 12) -> Step:
    """One prompt in one step, its first token read."""
    table = list(range(runner.layout.blocks_for(tokens)))
    ids = [random.Random(6).randrange(runner.config.vocab_size) for _ in range(tokens)]
    took = []
    for _ in range(trials):
        plan = StepPlan(0, [RequestKey(0)], [tokens], [0], ids, [table], [True], [GREEDY], [()], [None], [tokens])
        began = time.perf_counter()
        runner.run(plan)
        took.append(time.perf_counter() - began)
    wall_s = prefill_operations(runner, tokens) / walls.matmul
    return Step(f"{name} prefill {tokens}", statistics.median(took[2:]), wall_s, None, took[2:])


def prefill_operations(runner: GpuRunner, tokens: int) -> float:
    """Multiply-adds counted twice: all tokens through the layers, causal attention, one row through the head."""
    c = runner.config
    heads = c.heads * c.head_dim
    layer = c.hidden * (heads + 2 * c.kv_heads * c.head_dim) + heads * c.hidden + 3 * c.hidden * c.intermediate
    attention = 4 * heads * tokens * (tokens + 1) / 2
    return c.layers * (2.0 * tokens * layer + attention) + 2.0 * c.hidden * c.vocab_size


def figures(walls: Walls, folder: Path, quick: bool) -> Iterator[Step]:
    """The decode and prefill steps that have a target."""
    least = {"Llama-3.2-1B": 0.70, "Llama-3.1-8B": 0.80}
    for name in least:
        runner = open_model(name, folder, "cuda", tokens=8192, seqs=256, length=16384)
        print(f"{name}: " + ", ".join(f"{what} {count / 1e9:.2f} GB" for what, count in runner.memory_plan().items()))
        for batch, context in ((1, 1024), (1, 4096), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (32, 8192)):
            step = decode(runner, name, batch, context, SAMPLED, walls)
            step.target = least[name] if batch == 1 else (0.70 if batch >= 32 else None)
            yield step
            if not quick:
                yield decode(runner, name, batch, context, GREEDY, walls)
        for tokens, target in ((512, None), (2048, 0.75), (8192, 0.70)):
            step = prefill(runner, name, tokens, walls)
            step.target = target if name == "Llama-3.1-8B" else None
            yield step
        del runner
        torch.cuda.empty_cache()


# ---- idle


@dataclass(frozen=True, slots=True)
class Idle:
    """Of the device while requests come and go."""

    name: str
    share: float
    steps: int
    tokens_a_second: float
    target: float = 0.03

    @property
    def met(self) -> bool:
        return self.share <= self.target

    def line(self) -> str:
        mark = "met" if self.met else "MISSED"
        words = f"{self.name}: device idle {100 * self.share:.1f} % (wanted {100 * self.target:.0f} %) {mark}"
        return f"{words}; {self.steps} steps, {self.tokens_a_second:,.0f} tokens/s"


def idle(folder: Path, device: str, name: str, num_requests: int, most_rows: int) -> Idle:
    """As many requests as rows are under way at a time; each one that ends makes room for the next."""
    rng = random.Random(7)
    runner = open_model(name, folder, device, tokens=2048, seqs=most_rows, length=4096)
    vocab = runner.config.vocab_size
    requests = [
        Arrival([rng.randrange(vocab) for _ in range(rng.randint(50, 400))], rng.randint(50, 400))
        for _ in range(num_requests)
    ]
    with torch.profiler.profile(activities=_activities(device)) as profile:
        served = serve(runner, requests, most_rows=most_rows)
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() or () if _is_on_device(e))
    return Idle(
        f"{name}, {most_rows} at a time", _gaps(spans), served.steps, served.output_tokens / max(served.seconds, 1e-9)
    )


def _activities(device: str) -> list[torch.profiler.ProfilerActivity]:
    kinds = torch.profiler.ProfilerActivity
    return [kinds.CUDA if device == "cuda" else kinds.CPU]


def _is_on_device(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    return event.device_type is torch.autograd.DeviceType.CUDA


def _gaps(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first span to the last that none of them covers; spans are sorted."""
    if not spans:
        return 0.0
    reached = list(accumulate((end for _, end in spans), max))
    gaps = sum(max(0.0, begin - before) for (begin, _), before in zip(spans[1:], reached, strict=False))
    return gaps / (reached[-1] - spans[0][0])
