"""The compiled kernels equal their plain-torch references, and refuse shapes that they would misread."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import reference
from kernels.ops import CpuOps, PoolShape, StepRows, step_rows

STARTS = [0, 5, 200, 130, 17, 63, 64, 0]
COUNTS = [1, 1, 1, 77, 40, 1, 200, 3]


def _step(
    shape_of: tuple[int, int, int], heads: int, seed: int = 0
) -> tuple[PoolShape, torch.Tensor, list[list[int]], StepRows]:
    """Pool of two layers, scattered tables and the flattened step. shape_of: (kv_heads, head_dim, block_size)."""
    kv_heads, dim, size = shape_of
    needed = [-(-(s + c) // size) for s, c in zip(STARTS, COUNTS, strict=True)]
    shape = PoolShape(sum(needed) + 2, kv_heads, 2, size, dim)
    shape.check()
    blocks = list(range(shape.num_blocks))
    random.Random(seed).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(n)] for n in needed]
    pool = torch.randn(shape.num_blocks * shape.block_floats, generator=torch.Generator().manual_seed(seed))
    return shape, pool, tables, step_rows(shape, heads, STARTS, COUNTS, tables)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "size"),
    [(9, 3, 64, 16), (4, 2, 96, 32), (8, 1, 128, 16), (8, 8, 64, 32), (14, 2, 16, 8), (5, 5, 128, 16), (6, 2, 80, 16)],
)
@pytest.mark.parametrize("window", [0, 20, 100])
def test_rope_write_and_attention_equal_their_references(
    heads: int, kv_heads: int, dim: int, size: int, window: int
) -> None:
    shape, pool, tables, rows = _step((kv_heads, dim, size), heads)
    tokens = sum(COUNTS)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(300, dim // 2), torch.randn(300, dim // 2)
    weights = torch.rand(dim) + 0.5, torch.rand(dim) + 0.5
    positions, slots = torch.from_numpy(rows.positions), torch.from_numpy(rows.slots)
    q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    q = reference.rope(reference.rms_norm(q, weights[0], 1e-6), cos[positions], sin[positions])
    k = reference.rope(reference.rms_norm(k, weights[1], 1e-6), cos[positions], sin[positions])
    wanted_pool = pool.clone()
    reference.write_kv(shape.view(wanted_pool), 1, slots, k, v)

    ops = CpuOps(2)
    ops.rope_write(qkv, heads, shape, pool, 1, rows, cos, sin, (*weights, 1e-6))
    assert torch.allclose(pool, wanted_pool, atol=1e-5)

    out = ops.attention(qkv, heads, shape, pool, 1, rows, torch.empty(tokens, heads * dim), window)
    wanted = reference.attention(q, shape.view(wanted_pool), 1, STARTS, COUNTS, tables, window)
    assert (out - wanted.flatten(1)).abs().max() < 2e-5


def test_attention_does_not_read_beyond_the_last_token() -> None:
    """Old fault elsewhere: 0 * NaN of a slot not yet written. All of the pool that the step does not own is NaN
    here.
    """
    shape, pool, tables, rows = _step((2, 64, 16), 4)
    clean = pool.clone()
    view = shape.view(pool)
    used = torch.zeros(shape.num_blocks, 16, dtype=torch.bool)
    for start, count, table in zip(STARTS, COUNTS, tables, strict=True):
        for at in range(start + count):
            used[table[at // 16], at % 16] = True
    view.permute(0, 4, 1, 2, 3, 5)[~used] = float("nan")
    qkv = torch.randn(sum(COUNTS), 8 * 64)
    ops = CpuOps(1)
    out = ops.attention(qkv, 4, shape, pool, 0, rows, torch.empty(sum(COUNTS), 256))
    assert torch.equal(out, ops.attention(qkv, 4, shape, clean, 0, rows, torch.empty_like(out)))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 31, 100, 193])
@pytest.mark.parametrize(("columns", "depth"), [(576, 192), (100, 33), (17, 8), (16, 1), (1, 64)])
def test_linear_equals_its_reference_for_any_shape(rows: int, columns: int, depth: int) -> None:
    x, w, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    cut = columns // 3
    wanted = reference.linear(x, w, bias)
    for threads in (1, 2):
        ops = CpuOps(threads)
        parts = [part for part in (w[:cut].contiguous(), w[cut:].contiguous()) if len(part)]
        packed = ops.pack(parts, [bias[:cut], bias[cut:]])
        assert torch.allclose(ops.linear(x, packed, torch.empty(rows, columns)), wanted, atol=1e-4)
        plain = ops.pack([w])
        assert torch.allclose(ops.linear(x, plain, torch.empty(rows, columns)), wanted - bias, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 15, 40])
@pytest.mark.parametrize("width", [16, 576])
def test_norm_and_swiglu_equal_their_references(rows: int, width: int) -> None:
    ops = CpuOps(2)
    x, delta, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    wanted = reference.rms_norm(x + delta, weight, 1e-5)
    summed = x + delta
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5, torch.empty_like(x), delta), wanted, atol=1e-5)
    assert torch.equal(x, summed)
    gate_up = torch.randn(rows, 2 * width) * torch.tensor([0.1, 60.0]).repeat_interleave(width)[None]
    gate_up[0, :5] = torch.tensor([-200.0, 200.0, 0.0, -87.5, 88.0])
    got = ops.swiglu(gate_up, torch.empty(rows, width))
    assert torch.allclose(got, reference.swiglu(gate_up), atol=1e-4, rtol=1e-5)


def test_wrong_shapes_are_refused_before_anything_is_written() -> None:
    ops = CpuOps(1)
    weight = ops.pack([torch.randn(32, 16)])
    for x in (torch.randn(2, 17), torch.randn(2, 16).double(), torch.randn(16, 2).t(), torch.randn(16)):
        with pytest.raises(ValueError):
            ops.linear(x, weight, torch.empty(2, 32))
    with pytest.raises(ValueError):
        ops.linear(torch.randn(3, 16), weight, torch.empty(2, 32))
    with pytest.raises(ValueError):
        PoolShape(4, 1, 1, 12, 64).check()
    with pytest.raises(ValueError):
        PoolShape(4, 1, 1, 16, 40).check()
    shape = PoolShape(4, 1, 1, 16, 64)
    for starts, counts, tables in (([0], [17], [[0]]), ([0], [1], [[4]]), ([0], [1], [[-1]]), ([0], [0], [[0]])):
        with pytest.raises(ValueError):
            step_rows(shape, 2, starts, counts, tables)


def test_the_choice_of_implementation_is_visible() -> None:
    assert CpuOps(1).chosen["attention"] == "numba-cpu"
