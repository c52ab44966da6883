"""`python -m kernels.triton.tune [dtype,dim,query heads,KV heads,block ...]`: fill the table of launches on this GPU.

Each class starts from the rule and takes one field at a time to a better value, as long as there is one. A launch is
timed in a CUDA graph that goes through layers of a pool which together are larger than the second-level cache, in
random block order: as in a model's step, each layer's KV comes from memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from kernels.triton.attention_decode import decode_attention
from kernels.triton.attention_merge import Scratch
from kernels.triton.attention_prefill import prefill_attention
from kernels.triton.tuned import (
    DecodeLaunch,
    Heads,
    PrefillLaunch,
    Tuned,
    decode_class,
    decode_rule,
    device_of,
    dtype_name,
    fixed_class,
    prefill_class,
    prefill_rule,
)

DEFAULT = ("bfloat16,64,32,8,16", "bfloat16,128,32,8,16", "bfloat16,128,16,8,16")
"""Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B."""
DECODE = ((1, 4096), (1, 65536), (8, 4096), (32, 1024), (32, 16384), (128, 1024), (128, 4096), (256, 1024))
"""(rows, positions of each)."""
PREFILL = (16, 64, 2048)
"""Tokens of a row."""
POOL_BYTES = 1 << 30
REPLAYS = 5

Launch = TypeVar("Launch", DecodeLaunch, PrefillLaunch)


def descend(start: Launch, values: Mapping[str, Sequence[int]], time_us: Callable[[Launch], float]) -> Launch:
    """The best launch that single steps reach: fields take one of `values` while that is faster by 2 % at least."""
    best, best_us = start, time_us(start)
    better = True
    while better:
        better = False
        for field, choices in values.items():
            for value in choices:
                if value == asdict(best)[field]:
                    continue
                tried = replace(best, **{field: value})
                tried_us = time_us(tried)
                if tried_us < 0.98 * best_us:
                    best, best_us, better = tried, tried_us, True
    return best


def decode_values(start: DecodeLaunch) -> dict[str, list[int]]:
    """What `descend` tries. Pieces stay multiples of every tile."""
    return {
        "tile": [tile for tile in (start.tile // 2, start.tile * 2) if 16 <= tile <= 256],
        "num_warps": [4, 8],
        "num_stages": [3, 5],
        "splits": sorted({max(1, start.splits // 2), min(64, start.splits * 2)}),
        "least": [256, 512, 1024],
    }


def prefill_values() -> dict[str, list[int]]:
    return {"tile_rows": [64, 128], "tile": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]}


def graph_us(launches: Callable[[], None], count: int) -> float:
    """Median microseconds of one of `count` launches, replayed as a graph."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return sorted(times)[REPLAYS // 2]


class Bench:
    """A pool of one model's heads and what to time on it."""

    def __init__(self, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, block: int) -> None:
        self.dtype, self.dim, self.heads, self.kv_heads, self.block = dtype, dim, heads, kv_heads, block
        self.kind = Heads(dtype_name(dtype), dim, heads // kv_heads, block)

    def rows(self, rows: int, positions: int, tokens: int) -> None:
        """Make a pool for so many rows, of as many layers as POOL_BYTES holds, with `tokens` queries a row."""
        blocks = rows * -(-positions // self.block)
        layer_numbers = blocks * self.kv_heads * 2 * self.block * self.dim
        self.layers = max(1, min(64, POOL_BYTES // (layer_numbers * self.dtype.itemsize)))
        shape = (blocks, self.kv_heads, self.layers, 2, self.block, self.dim)
        self.pool = torch.randn(shape, dtype=self.dtype, device="cuda")
        self.tables = torch.randperm(blocks, device="cuda").int().view(rows, -1)
        self.q = torch.randn(rows * tokens, self.heads, self.dim, dtype=self.dtype, device="cuda")
        self.out = torch.empty_like(self.q)
        self.lengths = torch.full((rows,), positions, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        self.start_pos = self.lengths - tokens

    def decode_us(self, launch: DecodeLaunch) -> float:
        scratch = Scratch.make(len(self.lengths), self.heads, self.dim, launch.splits, "cuda")

        def step() -> None:
            for layer in range(self.layers):
                decode_attention(
                    self.q, self.pool, layer, self.tables, self.lengths, self.out, scratch=scratch, launch=launch
                )

        return _time(step, self.layers)

    def prefill_us(self, launch: PrefillLaunch, tokens: int) -> float:
        def step() -> None:
            for layer in range(self.layers):
                prefill_attention(
                    self.q,
                    self.pool,
                    layer,
                    self.tables,
                    self.starts,
                    self.start_pos,
                    self.out,
                    max_tokens=tokens,
                    launch=launch,
                )

        return _time(step, self.layers)


def _time(step: Callable[[], None], count: int) -> float:
    try:
        return graph_us(step, count)
    except OutOfResources:
        return float("inf")


def tune(table: Tuned, bench: Bench) -> Tuned:
    """The table with this device's best launches of the bench's heads; prints each."""
    device, kind = device_of(torch.device("cuda", torch.cuda.current_device())), bench.kind
    for rows, positions in DECODE:
        bench.rows(rows, positions, 1)
        pairs = rows * bench.kv_heads
        start = decode_rule(kind, pairs, positions, device.processors)
        decode = descend(start, decode_values(start), bench.decode_us)
        read = rows * positions * bench.kv_heads * bench.dim * 2 * bench.dtype.itemsize
        time_us = bench.decode_us(decode)
        print(f"{decode_class(kind, pairs, positions)}: {decode} {time_us:.1f} us {read / time_us / 1e3:.0f} GB/s")
        table = table.changed(device, decode_class(kind, pairs, positions), decode)
    for tokens in PREFILL:
        bench.rows(max(1, 2048 // tokens), 4096, tokens)
        start_prefill = prefill_rule(kind, tokens)
        prefill = descend(start_prefill, prefill_values(), lambda launch, n=tokens: bench.prefill_us(launch, n))
        print(f"{prefill_class(kind, tokens)}: {prefill} {bench.prefill_us(prefill, tokens):.1f} us")
        table = table.changed(device, prefill_class(kind, tokens), prefill)
    return table.changed(device, fixed_class(kind), prefill)


def main(arguments: Sequence[str]) -> None:
    torch.manual_seed(0)
    table = Tuned.load()
    for text in arguments or DEFAULT:
        dtype, *numbers = text.split(",")
        dim, heads, kv_heads, block = map(int, numbers)
        table = tune(table, Bench(getattr(torch, dtype), dim, heads, kv_heads, block))
        table.save()


if __name__ == "__main__":
    main(sys.argv[1:])
