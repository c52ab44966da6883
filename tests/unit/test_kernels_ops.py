"""The compiled kernels equal their plain-torch references, and refuse shapes that they would misread."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.ops import PoolShape, Program, StepRows, Then, step_rows
from kernels.weights import Codes, PackedWeight, Storage, pack, quantize_int8

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

    program, out = Program(2), torch.empty(tokens, heads * dim)
    program.rope_write(qkv, heads, shape, pool, 1, cos, sin, (*weights, 1e-6))
    program.attention(qkv, heads, shape, pool, 1, out, window)
    program.run(rows, 1)
    assert torch.allclose(pool, wanted_pool, atol=1e-5)

    program = Program(2)
    program.attention(qkv, heads, shape, pool, 1, out, window)
    program.run(rows)
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
    outs = []
    for memory in (pool, clean):
        program, out = Program(1), torch.empty(sum(COUNTS), 256)
        program.attention(qkv, 4, shape, memory, 0, out)
        program.run(rows)
        outs.append(out)
    assert torch.equal(*outs)


def _linear(x: torch.Tensor, weight: PackedWeight, threads: int = 2, then: Then = Then.STORE) -> torch.Tensor:
    out = torch.zeros(len(x), weight.columns // 2 if then is Then.SWIGLU else weight.columns)
    program = Program(threads)
    program.linear(x, weight, out, then)
    program.run(StepRows(len(x)))
    return out


ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 100, 193]
SHAPES = [(576, 192), (100, 33), (17, 8), (16, 1), (1, 64), (48, 700)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_linear_equals_its_reference_for_any_shape(rows: int, columns: int, depth: int) -> None:
    x, w, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    cut = columns // 3
    wanted = reference.linear(x, w, bias)
    parts = [part for part in (w[:cut].contiguous(), w[cut:].contiguous()) if len(part)]
    for threads in (1, 2):
        assert torch.allclose(_linear(x, pack(parts, [bias[:cut], bias[cut:]]), threads), wanted, atol=2e-4)
        assert torch.allclose(_linear(x, pack([w]), threads), wanted - bias, atol=2e-4)


def _codes(columns: int, depth: int, group: int, bits: int, shifted: bool) -> Codes:
    low, high = (0, 16) if bits == 4 else (-127, 128)
    scales = (torch.rand(columns, depth // group) * 0.1).half().float()
    offsets = torch.randn(columns, depth // group).half().float() if shifted else None
    return Codes(torch.randint(low, high, (columns, depth), dtype=torch.int8), scales, offsets, group, bits)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8", "int8_32", "int8_shifted", "int4_shifted"])
def test_stored_weights_compute_exactly_as_the_float32_values_they_stand_for(rows: int, kind: str) -> None:
    """Bit for bit: storage changes the bytes that are read and nothing else."""
    first, second, depth = 70, 41, 704
    if "int" in kind:
        group, bits = (depth if kind == "int8" else 32), int(kind[3])
        stored = [_codes(n, depth, group, bits, "shifted" in kind) for n in (first, second)]
        values = [codes.values() for codes in stored]
        packed = pack(stored)
    else:
        storage = Storage[kind.upper()]
        dtype = getattr(torch, kind)
        values = [torch.randn(n, depth).to(dtype).float() for n in (first, second)]
        packed = pack(values, storage=storage)
    assert packed.num_bytes < 0.8 * pack(values).num_bytes
    x = torch.randn(rows, depth)
    assert torch.equal(_linear(x, packed), _linear(x, pack(values)))


@pytest.mark.parametrize("storage", [Storage.FLOAT32, Storage.FLOAT16, Storage.BFLOAT16])
def test_embed_reads_rows_of_the_packed_table(storage: Storage) -> None:
    table = torch.randn(100, 300)
    packed = pack([table], storage=storage)
    out, program = torch.empty(5, 300), Program(2)
    program.embed(packed, out)
    ids = [0, 99, 17, 16, 15]
    program.run(StepRows(5, np.array(ids)))
    wanted = table[ids] if storage is Storage.FLOAT32 else table[ids].to(getattr(torch, storage.name.lower())).float()
    assert torch.equal(out, wanted)
    with pytest.raises(ValueError, match="vocabulary"):
        program.run(StepRows(1, np.array([100])))


def test_embed_reads_quantised_tables() -> None:
    codes = _codes(40, 64, 32, 4, True)
    out, program = torch.empty(3, 64), Program(1)
    program.embed(pack([codes]), out)
    program.run(StepRows(3, np.array([39, 0, 20])))
    assert torch.equal(out, codes.values()[[39, 0, 20]])


@pytest.mark.parametrize("rows", ROWS)
def test_linear_can_add_to_what_is_there_or_end_in_swiglu(rows: int) -> None:
    x, gate, up = torch.randn(rows, 40), torch.randn(48, 40), torch.randn(48, 40)
    gate[:5] *= 60
    wanted = reference.swiglu(torch.cat((x @ gate.T, x @ up.T), 1))
    got = _linear(x, pack([gate, up], paired=True), then=Then.SWIGLU)
    assert torch.allclose(got, wanted, atol=1e-3, rtol=1e-5)
    biases = [torch.randn(48), torch.randn(48)]
    wanted = reference.swiglu(torch.cat((x @ gate.T + biases[0], x @ up.T + biases[1]), 1))
    got = _linear(x, pack([gate, up], biases, paired=True), then=Then.SWIGLU)
    assert torch.allclose(got, wanted, atol=1e-3, rtol=1e-5)
    out, program = torch.ones(rows, 48), Program(2)
    program.linear(x, pack([gate]), out, Then.ADD)
    program.run(StepRows(rows))
    assert torch.equal(out, 1 + _linear(x, pack([gate])))


def test_swiglu_takes_any_gate() -> None:
    x, one = torch.eye(16), torch.eye(16)
    gates = torch.tensor([-200.0, 200.0, 0.0, -87.5, 88.0, *[1.0] * 11])
    got = _linear(x, pack([one * gates, one], paired=True), then=Then.SWIGLU)
    assert torch.allclose(got, torch.nn.functional.silu(gates) * one, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 15, 40])
@pytest.mark.parametrize("width", [16, 576])
def test_norm_equals_its_reference(rows: int, width: int) -> None:
    x, weight, out, program = torch.randn(rows, width), torch.randn(width), torch.empty(rows, width), Program(2)
    program.rms_norm(x, weight, 1e-5, out)
    program.run(StepRows(rows))
    assert torch.allclose(out, reference.rms_norm(x, weight, 1e-5), atol=1e-5)


def test_sampled_rows_are_picked_and_computed_alone() -> None:
    x, picked, weight = torch.randn(9, 16), torch.zeros(4, 16), torch.randn(32, 16)
    out, program = torch.zeros(4, 32), Program(2)
    program.pick(x, picked)
    program.linear(picked, pack([weight]), out, sampled=True)
    program.run(StepRows(9, sampled=np.array([8, 2])))
    assert torch.equal(picked[:2], x[[8, 2]]) and not picked[2:].any() and not out[2:].any()
    assert torch.allclose(out[:2], x[[8, 2]] @ weight.T, atol=1e-4)


def test_int8_for_each_channel_is_within_half_a_step() -> None:
    weight = torch.randn(30, 64) * torch.logspace(-3, 3, 30)[:, None]
    codes = quantize_int8(weight)
    assert ((codes.values() - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all()
    assert not quantize_int8(torch.zeros(2, 8)).values().any()


def test_wrong_shapes_are_refused_before_anything_is_written() -> None:
    weight = pack([torch.randn(32, 16)])
    for x in (torch.randn(2, 17), torch.randn(2, 16).double(), torch.randn(16, 2).t(), torch.randn(16)):
        with pytest.raises(ValueError):
            Program(1).linear(x, weight, torch.empty(2, 32))
    program, out = Program(1), torch.zeros(2, 32)
    program.linear(torch.randn(3, 16), weight, out)
    with pytest.raises(ValueError, match="more than the buffers"):
        program.run(StepRows(3))
    assert not out.any()
    with pytest.raises(ValueError):
        pack([torch.randn(32, 16), torch.randn(32, 17)])
    with pytest.raises(ValueError):
        pack([torch.randn(17, 16), torch.randn(17, 16)], paired=True)
    with pytest.raises(ValueError):
        pack([quantize_int8(torch.randn(32, 16)), torch.randn(32, 16)])
    with pytest.raises(ValueError):
        pack([torch.randn(32, 16)], storage=Storage.INT8)
    with pytest.raises(ValueError):
        PoolShape(4, 1, 1, 12, 64).check()
    with pytest.raises(ValueError):
        PoolShape(4, 1, 1, 16, 40).check()
    shape = PoolShape(4, 1, 1, 16, 64)
    for starts, counts, tables in (([0], [17], [[0]]), ([0], [1], [[4]]), ([0], [1], [[-1]]), ([0], [0], [[0]])):
        with pytest.raises(ValueError):
            step_rows(shape, 2, starts, counts, tables)


def test_the_choice_of_implementation_is_visible() -> None:
    assert Program.chosen()["attention"] == "numba-cpu"
