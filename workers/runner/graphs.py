"""Steps of decode rows alone, recorded once for each of a few sizes and replayed: launching a graph takes the host
microseconds where launching its kernels takes it milliseconds.

A step goes into the smallest bucket that holds its rows and its longest block table; rows that are left over are
padding. Steps with longer rows run as they are.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.gpu_rows import DeviceRows, RowBuffers, RowColumns, RowLayout, layout_for

log = logging.getLogger("headrace.workers.graphs")

_FINE_FROM = 8
"""From this batch size on there is a bucket half way to the next power of two: at most a third is padding."""
_WIDTH_STEP = 4
_FIRST_WIDTH_TOKENS = 1024


def batch_buckets(max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 12, 16, 24, 32 ... max_seqs."""
    sizes, size = {max_seqs}, 1
    while size < max_seqs:
        sizes.add(size)
        if size >= _FINE_FROM and size + size // 2 < max_seqs:
            sizes.add(size + size // 2)
        size *= 2
    return tuple(sorted(sizes))


def width_buckets(max_blocks: int, block_size: int) -> tuple[int, ...]:
    """Blocks of a table: for contexts of 1024 tokens, and 4 times more each, up to max_blocks."""
    sizes, size = {max_blocks}, max(1, _FIRST_WIDTH_TOKENS // block_size)
    while size < max_blocks:
        sizes.add(size)
        size *= _WIDTH_STEP
    return tuple(sorted(sizes))


class Graph(Protocol):
    def replay(self) -> None:
        """Run again what was recorded, over what its buffers hold now."""


class CudaGraph:
    """A recorded sequence of kernels. Graphs of one pool share memory: they run one after the other."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        work()  # compiles and loads what the recording must not wait for
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            work()

    def replay(self) -> None:
        self._graph.replay()


class CalledGraph:
    """The same on a CPU: the work is called again. Buffers, buckets and padding are those of a graph."""

    def __init__(self, work: Callable[[], None], pool: Any = None) -> None:
        self.replay = work


@dataclass(frozen=True, slots=True)
class Bucket:
    layout: RowLayout
    rows: DeviceRows
    forward: Graph
    sample: Graph
    """Chooses tokens from what `forward` left, for steps that ask for nothing but a choice."""


class GraphTable:
    """The buckets of one engine, and how often each way was taken."""

    def __init__(
        self,
        batches: Iterable[int],
        widths: Iterable[int],
        buffers: RowBuffers,
        forward: Callable[[DeviceRows], None],
        sample: Callable[[DeviceRows], None],
    ) -> None:
        """forward: enqueues a step of decode rows that all sample; sample: chooses their tokens."""
        self._batches, self._widths = tuple(batches), tuple(widths)
        self._buffers = buffers
        self._forward, self._sample = forward, sample
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self.off_reason = "not_recorded"
        """Why there are no graphs; empty when there are."""
        self.counters: Counter[str] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def turn_off(self, reason: str) -> None:
        log.info("graphs_off reason=%s", reason)
        self.off_reason = reason

    def record(self, device: torch.device) -> None:
        """Record every bucket, the largest first: the others fit into the memory that it took."""
        on_gpu = device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else 0
        make: Callable[..., Graph] = CudaGraph if on_gpu else CalledGraph
        began = time.monotonic()
        sizes = [(batch, width) for batch in reversed(self._batches) for width in reversed(self._widths)]
        samples: dict[int, Graph] = {}
        for done, (batch, width) in enumerate(sizes, 1):
            layout = layout_for(batch, batch, width, batch)
            rows = self._buffers.rows(layout, num_decode=batch, max_tokens=0)
            forward = make(lambda rows=rows: self._forward(rows), pool)
            # Settings lie at the beginning of every layout: one graph serves all widths.
            if batch not in samples:
                samples[batch] = make(lambda rows=rows: self._sample(rows), pool)
            self._buckets[batch, width] = Bucket(layout, rows, forward, samples[batch])
            log.info(
                "graph_recorded done=%d of=%d rows=%d blocks=%d took_s=%.1f",
                done,
                len(sizes),
                batch,
                width,
                time.monotonic() - began,
            )
        if on_gpu:
            self.num_bytes = max(0, free_bytes - torch.cuda.mem_get_info(device)[0])
        self.off_reason = ""

    def choose(self, columns: RowColumns) -> Bucket | None:
        """The bucket for a step, counted; None: run it as it is."""
        if reason := self._unfit(columns):
            self.counters[f"graph_eager_{reason}"] += 1
            return None
        batch = self._batches[bisect_left(self._batches, columns.rows)]
        width = self._widths[bisect_left(self._widths, columns.width)]
        self.counters[f"graph_hits_{batch}"] += 1
        self.counters["graph_rows"] += columns.rows
        self.counters["graph_padding_rows"] += batch - columns.rows
        return self._buckets[batch, width]

    def _unfit(self, columns: RowColumns) -> str:
        if columns.num_decode < columns.rows:
            return "prefill"
        if columns.num_sampled < columns.rows:
            return "unsampled"
        if self.off_reason:
            return self.off_reason
        if columns.rows > self._batches[-1] or columns.width > self._widths[-1]:
            return "size"
        return ""
