"""The start-up proof of `exact` mode (DESIGN law 6): a row's bits do not depend on its company, its place or the
threads.

The kernels promise it by construction (one ascending chain of multiply-adds for each element); this test shows that the
compiler of this machine kept the promise, at the widths of the model to be served.
"""

from __future__ import annotations

import torch

from headrace.errors import StartupError
from kernels.ops import CpuOps, PoolShape, step_rows
from workers.model.config import ModelConfig

_ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 16, 29)
_KEYS = 150
_COLUMNS = 2064
"""Columns of a trial matrix: the widths behind it are the same loop run more often."""


def exact_self_test(ops: CpuOps, config: ModelConfig) -> str:
    """Returns what was shown, in words; raises StartupError when two bits differ. Well under a second."""
    generator = torch.Generator().manual_seed(7)
    trials = [ops, CpuOps(1)]
    for depth in sorted({config.hidden, config.intermediate, config.heads * config.head_dim}):
        _test_rows(trials, depth, generator)
    _test_attention(trials, config, generator)
    return f"any row count, 1 and {ops.threads} threads"


def _require(equal: bool, what: str) -> None:
    if not equal:
        raise StartupError(f"exact mode is not available on this machine: {what} depends on the batch or the threads")


def _test_rows(trials: list[CpuOps], depth: int, generator: torch.Generator) -> None:
    """GEMM, norm and SwiGLU: each count of rows, at two places, against all rows at once."""
    x = torch.randn(max(_ROWS) + 1, depth, generator=generator)
    weight = trials[0].pack([torch.randn(min(_COLUMNS, 4 * depth), depth, generator=generator) * 0.05])
    norm = torch.randn(depth, generator=generator)

    def compute(ops: CpuOps, part: torch.Tensor) -> torch.Tensor:
        normed = ops.rms_norm(part.clone(), norm, 1e-5, torch.empty_like(part), part)
        wide = ops.linear(normed, weight, torch.empty(len(part), weight.columns))
        width = weight.columns // 32 * 16
        act = ops.swiglu(wide[:, : 2 * width].contiguous(), torch.empty(len(part), width))
        return torch.cat((wide, act), dim=1)

    whole = compute(trials[0], x)
    for ops in trials:
        for rows in _ROWS:
            for offset in (0, 1):
                part = x[offset : offset + rows].clone()
                _require(torch.equal(compute(ops, part), whole[offset : offset + rows]), f"a product of depth {depth}")


def _test_attention(trials: list[CpuOps], config: ModelConfig, generator: torch.Generator) -> None:
    """One sequence in one chunk against the same in chunks and single tokens, beside another."""
    blocks = -(-_KEYS // 16)
    shape = PoolShape(2 * blocks, config.kv_heads, 1, 16, config.head_dim)
    pool = torch.randn(shape.num_blocks * shape.block_floats, generator=generator)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(_KEYS, width, generator=generator)
    table = list(range(0, 2 * blocks, 2))
    other = list(range(1, 2 * blocks, 2))

    def compute(ops: CpuOps, pieces: list[tuple[int, int]], window: int) -> torch.Tensor:
        result = []
        for start, count in pieces:
            rows = step_rows(shape, config.heads, [start, 0], [count, 40], [table, other])
            part = torch.cat((qkv[start : start + count], qkv[:40]))
            out = torch.empty(len(part), config.heads * config.head_dim)
            result.append(ops.attention(part, config.heads, shape, pool, 0, rows, out, window)[:count])
        return torch.cat(result)

    for window in sorted({0, 37, *config.windows}):
        whole = compute(trials[0], [(0, _KEYS)], window)
        for ops in trials:
            pieces = [(0, 33), (33, 64), (97, 1), (98, _KEYS - 98)]
            _require(torch.equal(compute(ops, pieces, window), whole), "attention")
