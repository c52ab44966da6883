"""Time on the device, and what the device itself can do in the same run: the walls that everything else is a share of.

Short work is recorded as a CUDA graph, so that what is timed is the device and not Python's launches; each call of a
recording uses other memory where the caller gives it several, so that nothing is found in the second-level cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BUDGET_S = 0.25
"""Of one figure, roughly."""
MATMUL = 8192
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one call: median, least, most over the repetitions."""

    median: float
    least: float
    most: float
    trials: tuple[float, ...] = ()


def graph_of(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Replays all of them in one launch. They must not allocate what has to outlive them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and fills caches of launches
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def time_calls(calls: Sequence[Callable[[], object]], *, record: bool = True, budget_s: float = BUDGET_S) -> Took:
    """Each call once a repetition, in order; the figure is that of one call. record: as a graph."""
    run: Callable[[], object] = graph_of(calls) if record else lambda: [call() for call in calls]
    run()
    once = _events(run)
    trials = max(5, min(200, int(budget_s / max(once, 1e-6))))
    each = sorted(_events(run) / len(calls) for _ in range(trials))
    return Took(statistics.median(each), each[0], each[-1], tuple(each))


def _events(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@triton.jit
def _read(source, sums, count, TILE: tl.constexpr, ROUNDS: tl.constexpr):
    """Adds up what a program reads, in 16 bytes a thread, so that nothing but reading remains."""
    at = tl.program_id(0).to(tl.int64) * TILE * ROUNDS + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for _ in range(ROUNDS):
        total += tl.load(source + at, mask=at < count, other=0.0)
        at += TILE
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@dataclass(frozen=True, slots=True)
class Walls:
    """read, copy: bytes a second (copy counts both directions); matmul: bf16 operations a second at 8192^3."""

    device: str
    read: float
    copy: float
    matmul: float
    mean_matmul: float
    """Over two seconds: what remains once the chip is warm."""

    def lines(self) -> list[str]:
        return [
            f"{self.device}",
            f"read {self.read / 1e9:,.0f} GB/s, copy {self.copy / 1e9:,.0f} GB/s (both directions), "
            f"matmul 8192^3 bf16 {self.matmul / 1e12:,.0f} TFLOP/s (over two seconds {self.mean_matmul / 1e12:,.0f})",
        ]


def measure_walls() -> Walls:
    """The best of what torch and a plain kernel of our own reach."""
    source, target = (torch.zeros(GIB, dtype=torch.float32, device="cuda") for _ in range(2))
    reads = [time_calls([source.sum]).least]
    for tile, rounds, warps in ((2048, 8, 8), (4096, 8, 8), (4096, 32, 8), (8192, 16, 16)):
        programs = -(-source.numel() // (tile * rounds))
        sums = torch.empty(programs, device="cuda")

        def read(tile: int = tile, rounds: int = rounds, warps: int = warps, sums: torch.Tensor = sums) -> None:
            _read[(len(sums),)](source, sums, source.numel(), TILE=tile, ROUNDS=rounds, num_warps=warps)

        reads.append(time_calls([read]).least)
    copy = time_calls([lambda: target.copy_(source)]).least
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    product = time_calls([lambda: torch.mm(a, b, out=out)])
    warm = time_calls([lambda: torch.mm(a, b, out=out)], budget_s=2.0)
    operations = 2 * MATMUL**3
    return Walls(
        torch.cuda.get_device_name(),
        source.nbytes / min(reads),
        2 * source.nbytes / copy,
        operations / product.median,
        operations / warm.median,
    )
