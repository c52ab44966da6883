"""The start-up proof of `exact` mode (DESIGN law 6): a row's bits do not depend on its company, its place or the
threads.

The kernels promise it by construction (one ascending chain of multiply-adds for each element); this test shows that the
compiler of this machine kept the promise, at the widths of the model to be served.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from headrace.errors import StartupError
from kernels.ops import PoolShape, Program, StepRows, Then, padded_stride, step_rows
from kernels.weights import Codes, Storage, pack
from workers.model.config import ModelConfig
from workers.model.matrices import storage_text

_ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 16, 29, 97)
_KEYS = 150
_GROUP = 16
"""Depth that shares a scale in a trial matrix of integers; every model's widths are multiples of it."""
_COLUMNS = 2064
"""Columns of a trial matrix, at most: the widths behind it are the same loop run more often."""


def exact_self_test(threads: int, config: ModelConfig, storages: Collection[Storage]) -> str:
    """Returns what was shown, in words; raises StartupError when two bits differ. Well under a second.

    storages: the ways in which the model's weights are kept.
    """
    generator = torch.Generator().manual_seed(7)
    trials = sorted({1, Program(threads).threads})
    for depth in sorted({config.hidden, config.intermediate, config.heads * config.head_dim}):
        for storage in storages:
            _test_rows(trials, depth, storage, generator)
    _test_attention(trials, config, generator)
    return f"any row count, {' and '.join(map(str, trials))} threads"


def _require(equal: bool, what: str) -> None:
    if not equal:
        raise StartupError(f"exact mode is not available on this machine: {what} depends on the batch or the threads")


def _trial_weight(columns: int, depth: int, storage: Storage, generator: torch.Generator) -> torch.Tensor | Codes:
    if storage in (Storage.FLOAT32, Storage.FLOAT16, Storage.BFLOAT16):
        return torch.randn(columns, depth, generator=generator) * 0.05
    bits = 4 if storage is Storage.INT4_SHIFTED else 8
    low, high = (0, 16) if bits == 4 else (-127, 128)
    codes = torch.randint(low, high, (columns, depth), dtype=torch.int8, generator=generator)
    groups = depth // _GROUP
    scales = torch.rand(columns, groups, generator=generator) * 0.01
    offsets = None if storage is Storage.INT8 else torch.randn(columns, groups, generator=generator) * 0.05
    return Codes(codes, scales, offsets, _GROUP, bits)


def _test_rows(trials: list[int], depth: int, storage: Storage, generator: torch.Generator) -> None:
    """GEMM, norm and SwiGLU: each count of rows, at two places, against all rows at once."""
    x = torch.randn(max(_ROWS) + 1, depth, generator=generator)
    half = min(_COLUMNS, 2 * depth) // 16 * 16
    matrices = [_trial_weight(half, depth, storage, generator) for _ in range(2)]
    weight = pack(matrices, storage=storage, paired=True)
    norm = torch.randn(depth, generator=generator)
    normed, act, wide = torch.empty_like(x), torch.empty(len(x), half), torch.empty(len(x), 2 * half)

    def compute(program: Program, first: int, count: int) -> torch.Tensor:
        source[:count] = x[first : first + count]
        program.run(StepRows(count))
        return torch.cat((wide[:count], act[:count]), dim=1)

    source = torch.empty(len(x), padded_stride(depth))[:, :depth]
    whole = None
    for threads in trials:
        program = Program(threads)
        program.rms_norm(source, norm, 1e-5, normed)
        program.linear(normed, weight, wide)
        program.linear(normed, weight, act, Then.SWIGLU)
        whole = compute(program, 0, len(x)) if whole is None else whole
        for rows in _ROWS:
            for offset in (0, 1):
                equal = torch.equal(compute(program, offset, rows), whole[offset : offset + rows])
                _require(equal, f"a product of depth {depth} with {storage_text([storage])} weights")


def _test_attention(trials: list[int], config: ModelConfig, generator: torch.Generator) -> None:
    """One sequence in one chunk against the same in chunks and single tokens, beside another."""
    blocks = -(-_KEYS // 16)
    shape = PoolShape(2 * blocks, config.kv_heads, 1, 16, config.head_dim)
    pool = torch.randn(shape.num_blocks * shape.block_floats, generator=generator)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(_KEYS, width, generator=generator)
    table = list(range(0, 2 * blocks, 2))
    other = list(range(1, 2 * blocks, 2))
    source, out = torch.empty(_KEYS + 40, width), torch.empty(_KEYS + 40, config.heads * config.head_dim)

    def compute(program: Program, pieces: list[tuple[int, int]]) -> torch.Tensor:
        result = []
        for start, count in pieces:
            source[:count] = qkv[start : start + count]
            source[count : count + 40] = qkv[:40]
            program.run(step_rows(shape, config.heads, [start, 0], [count, 40], [table, other]))
            result.append(out[:count].clone())
        return torch.cat(result)

    for window in sorted({0, 37, *config.windows}):
        whole = None
        for threads in trials:
            program = Program(threads)
            program.attention(source, config.heads, shape, pool, 0, out, window)
            whole = compute(program, [(0, _KEYS)]) if whole is None else whole
            pieces = [(0, 33), (33, 64), (97, 1), (98, _KEYS - 98)]
            _require(torch.equal(compute(program, pieces), whole), "attention")
