"""Each kernel: its error against float64 on random inputs with poisoned outputs, then its time as a share of what the
device did in the same run.

The errors can be had on a CPU, through Triton's interpreter, with `sizes="tiny"`; times need a device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.clock import Took, Walls, time_calls
from kernels import reference
from kernels.triton.attention_decode import decode_attention
from kernels.triton.attention_merge import Scratch
from kernels.triton.attention_prefill import prefill_attention
from kernels.triton.matmul import linear
from kernels.triton.rows import add_rms_norm, rope_write, swiglu
from kernels.triton.tuned import MAX_SPLITS

ERROR_SHARES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Largest error as a share of the largest true value: a few roundings of the dtype."""
FIXED_SPLITS = 8
LAYERS = 4
"""Of a pool whose calls must not find the last one's KV in the cache."""


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    block: int = 16

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads x {self.dim}, blocks of {self.block}"


@dataclass(slots=True)
class Figure:
    """One line of the table. `target`: least share, or most seconds where `wall` is empty; None: no target."""

    name: str
    took: Took
    share: float
    wall: str
    target: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    """Seconds of others over the same work."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.share >= self.target if self.wall else self.took.median <= self.target

    def line(self) -> str:
        share = f"{self.share:5.2f} of {self.wall}" if self.wall else ""
        mark = {None: "", True: "  met", False: "  MISSED"}[self.met]
        wanted = "" if self.target is None else f" (wanted {self.target if self.wall else f'{self.target * 1e6:g} us'})"
        others = "".join(f"  {name} {seconds / self.took.median:.2f}x" for name, seconds in self.peers.items())
        return f"{self.name:56} {self.took.median * 1e6:10.1f} us  {share}{wanted}{mark}{others}"


# ---- inputs


@dataclass(slots=True)
class Paged:
    """A pool in random order and rows that end in it."""

    pool: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    start_pos: Tensor
    num_tokens: list[int]

    @property
    def rows(self) -> int:
        return len(self.num_tokens)


def paged(
    kind: Heads, lengths: list[int], num_tokens: list[int], layers: int, dtype: torch.dtype, device: str
) -> Paged:
    """KV of rows of these lengths, own tokens included; blocks that belong to nobody are NaN."""
    needed = [-(-length // kind.block) for length in lengths]
    count = sum(needed) + 2
    order = torch.randperm(count - 1, device="cpu")[: sum(needed)] + 1
    pool = torch.empty(count, kind.kv_heads, layers, 2, kind.block, kind.dim, dtype=dtype, device=device)
    for part in pool.split(max(1, (256 << 20) // pool[0].nbytes)):
        part.normal_()
    used = torch.zeros(count, dtype=torch.bool)
    used[order] = True
    pool[(~used).to(device)] = float("nan")
    tables = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32)
    at = 0
    for row, many in enumerate(needed):
        tables[row, :many] = order[at : at + many]
        at += many
    starts = torch.tensor([0, *num_tokens]).cumsum(0)
    start_pos = torch.tensor(lengths) - torch.tensor(num_tokens)
    ints = (torch.tensor(lengths), starts, start_pos)
    on_device = [tensor.to(device=device, dtype=torch.int32) for tensor in ints]
    return Paged(pool, tables.to(device), *on_device, num_tokens)


# ---- errors


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed  # NaN is not

    def line(self) -> str:
        return f"{'ok    ' if self.good else 'WRONG '} {self.name:76} {self.error:.1e} (allowed {self.allowed:.0e})"


def checks(device: str, sizes: str) -> Iterator[Check]:
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if sizes == "full" else [torch.float32]
    for dtype in dtypes:
        yield from _attention_checks(device, sizes, dtype)
        yield from _row_checks(device, sizes, dtype)
    if device == "cuda":
        yield from _invariance_checks()


def _check(name: str, out: Tensor, wanted: Tensor, dtype: torch.dtype) -> Check:
    error = ((out.double() - wanted).abs().max() / wanted.abs().max()).item()
    return Check(f"{name}, {str(dtype).removeprefix('torch.')}", error, ERROR_SHARES[dtype])


def _attention_checks(device: str, sizes: str, dtype: torch.dtype) -> Iterator[Check]:
    full = sizes == "full"
    kinds = [Heads(8, 8, 64), Heads(32, 8, 128), Heads(12, 4, 96, 32), Heads(16, 1, 256, 64), Heads(14, 2, 64)]
    decode_lengths = [1, 5000, 0, 16, 17, 1023, 4096] if full else [1, 33, 0]
    chunks = ([1, 700, 16, 0, 129], [1, 2000, 31, 0, 900]) if full else ([1, 5, 0], [3, 21, 0])
    for kind in kinds if full else kinds[:1]:
        for window in (0, 100):
            data = paged(kind, decode_lengths, [1] * len(decode_lengths), 2, dtype, device)
            q = torch.randn(data.rows, kind.heads, kind.dim, dtype=dtype, device=device)
            out = torch.full_like(q, float("nan"))
            decode_attention(q, data.pool, 1, data.tables, data.lengths, out, window=window)
            yield _check(f"decode {kind}, window {window}", out, _attention(q, data, window), dtype)
            data = paged(kind, chunks[1], chunks[0], 2, dtype, device)
            q = torch.randn(sum(chunks[0]), kind.heads, kind.dim, dtype=dtype, device=device)
            out, longest = torch.full_like(q, float("nan")), max(chunks[0])
            tables, starts, start_pos = data.tables, data.starts, data.start_pos
            prefill_attention(q, data.pool, 1, tables, starts, start_pos, out, max_tokens=longest, window=window)
            yield _check(f"prefill {kind}, window {window}", out, _attention(q, data, window), dtype)


def _attention(q: Tensor, data: Paged, window: int) -> Tensor:
    """In float64; zeros for rows without a position."""
    counts = [count if length else 0 for count, length in zip(data.num_tokens, data.lengths.tolist(), strict=True)]
    starts = [max(0, length - count) for length, count in zip(data.lengths.tolist(), counts, strict=True)]
    wanted = torch.zeros(q.shape, dtype=torch.float64)
    there = torch.repeat_interleave(torch.tensor([c > 0 for c in counts]), torch.tensor(data.num_tokens))
    pool = data.pool.double().cpu().nan_to_num()
    wanted[there] = reference.attention(q.double().cpu()[there], pool, 1, starts, counts, data.tables.tolist(), window)
    return wanted.to(q.device)


def _row_checks(device: str, sizes: str, dtype: torch.dtype) -> Iterator[Check]:
    rows, width, inner = (257, 2880, 8192) if sizes == "full" else (5, 96, 128)
    make = partial(torch.randn, dtype=dtype, device=device)
    residual, delta, weight = make(rows, width), make(rows, width), make(width)
    out, before = torch.full_like(residual, float("nan")), residual.clone()
    add_rms_norm(residual, delta, weight, 1e-5, out)
    wanted = reference.rms_norm(residual.double(), weight.double(), 1e-5)
    yield _check(f"norm {rows} x {width}", out, wanted, dtype)
    yield _check(f"residual {rows} x {width}", residual, before.double() + delta.double(), dtype)
    gate_up = make(rows, 2 * inner)
    act = torch.full((rows, inner), float("nan"), dtype=dtype, device=device)
    swiglu(gate_up, act)
    yield _check(f"swiglu {rows} x {inner}", act, reference.swiglu(gate_up.double()), dtype)
    yield from _rope_checks(device, dtype)
    for m in (1, 16, 97):
        x, matrix, bias = make(m, width), make(inner, width) * 0.05, make(inner)
        product = torch.full((m, inner), float("nan"), dtype=dtype, device=device)
        linear(x, matrix, product, bias)
        wanted = reference.linear(x.double(), matrix.double(), bias.double())
        yield _check(f"linear {m} x {width} x {inner}", product, wanted, dtype)


def _invariance_checks() -> Iterator[Check]:
    """A row alone against the same row among others, bit for bit: on a device only, the interpreter's products are
    the host's.
    """
    dtype, kind = torch.bfloat16, Heads(32, 8, 128)
    make = partial(torch.randn, dtype=dtype, device="cuda")
    for depth, columns in ((2048, 3072), (4096, 14336), (14336, 4096)):
        x, matrix = make(300, depth), make(columns, depth)
        alone, among = make(1, columns), make(300, columns)
        linear(x[:1], matrix, alone)
        for rows in (2, 16, 17, 97, 128, 300):
            linear(x[:rows], matrix, among[:rows])
            yield _same(f"linear {depth} x {columns}, a row among {rows}", alone, among[:1])
    data = paged(kind, [4000, *(random.Random(3).randint(1, 5000) for _ in range(63))], [1] * 64, 1, dtype, "cuda")
    q = make(64, kind.heads, kind.dim)
    outs = [torch.empty_like(q[:rows]) for rows in (1, 64)]
    for out in outs:
        rows = len(out)
        decode_attention(q[:rows], data.pool, 0, data.tables[:rows], data.lengths[:rows], out, splits=FIXED_SPLITS)
    yield _same("decode with fixed splits, a row among 64", outs[0], outs[1][:1])


def _same(name: str, first: Tensor, second: Tensor) -> Check:
    return Check(name, float((first != second).sum()), 0.0)


def _rope_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    kind, tokens = Heads(8, 2, 64), 5
    data = paged(kind, [4 * kind.block], [tokens], 2, dtype, device)
    angles = torch.rand(64, kind.dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 3, 17, 40, 63], dtype=torch.int32, device=device)
    slots = data.tables[0, positions.long() // kind.block].long() * kind.block + positions % kind.block
    slots[2] = -1
    qkv = torch.randn(tokens, (kind.heads + 2 * kind.kv_heads) * kind.dim, dtype=dtype, device=device)
    norms = tuple(torch.rand(kind.dim, dtype=dtype, device=device) + 0.5 for _ in range(2))
    wide = qkv.double().unflatten(1, (-1, kind.dim))
    split = kind.heads, kind.kv_heads, kind.kv_heads
    q, k, v = wide.split(split, dim=1)
    turn = [table[positions.long()].double() for table in (cos, sin)]
    q, k = (reference.rope(reference.rms_norm(x, w.double(), 1e-6), *turn) for x, w in zip((q, k), norms, strict=True))
    wanted_pool = data.pool.double()
    there = slots >= 0
    reference.write_kv(wanted_pool, 1, slots[there], k[there], v[there])
    rope_write(qkv, kind.heads, data.pool, 1, positions, slots, cos, sin, (*norms, 1e-6))
    got = qkv.unflatten(1, (-1, kind.dim))[:, : kind.heads]
    yield _check("rope, queries", got[there], q[there], dtype)
    yield _check("rope, pool", data.pool.nan_to_num(), wanted_pool.nan_to_num(), dtype)


# ---- times


def times(walls: Walls, quick: bool = False) -> Iterator[Figure]:
    """bf16 on the current CUDA device. quick: only the figures that have a target."""
    for kind in (Heads(32, 8, 128), Heads(32, 8, 64)):
        for batch in (1, 8, 32, 128):
            for context in (1024, 4096, 16384, 65536):
                yield _decode_time(kind, batch, context, walls, peers=not quick)
    for tokens in (512, 2048, 8192):
        yield _prefill_time(Heads(32, 8, 128), tokens, 0, walls)
    yield _prefill_time(Heads(32, 8, 128), 2048, 30_000, walls)
    yield from _row_times(walls)


def _decode_time(kind: Heads, batch: int, context: int, walls: Walls, peers: bool) -> Figure:
    one_layer = batch * context * kind.kv_heads * kind.dim * 2 * 2
    layers = LAYERS if one_layer < 2 << 30 else 1
    data = paged(kind, [context] * batch, [1] * batch, layers, torch.bfloat16, "cuda")
    q = torch.randn(batch, kind.heads, kind.dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    scratch = Scratch.make(batch, kind.heads, kind.dim, MAX_SPLITS, "cuda")
    calls = [
        partial(decode_attention, q, data.pool, layer, data.tables, data.lengths, out, scratch=scratch)
        for layer in range(layers)
    ]
    took = time_calls(calls)
    name = f"decode {kind}, {batch} x {context}"
    share = one_layer / took.median / walls.read
    target = 0.90 if one_layer >= 1 << 30 else None
    others = _decode_peers(kind, data, q, layers) if peers else {}
    if (kind.dim, batch, context) == (128, 1, 4096):
        return Figure(name, took, share, "", 12e-6, others)
    return Figure(name, took, share, "read", target, others)


def _decode_peers(kind: Heads, data: Paged, q: Tensor, layers: int) -> dict[str, float]:
    """Over KV that is gathered already: their best case."""
    batch = data.rows
    found = {}
    try:
        gathered = [_gathered(data, layer) for layer in range(layers)]
        query = q[:, :, None]
        sdpa: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
        found["SDPA"] = time_calls([partial(sdpa, query, k, v, enable_gqa=True) for k, v in gathered]).median
        if batch * gathered[0][0].shape[2] <= 32 * 16384:
            flex = _flex()
            found["FlexAttention"] = time_calls(
                [partial(flex, query, k, v, enable_gqa=True) for k, v in gathered]
            ).median
    except (RuntimeError, torch.OutOfMemoryError) as error:
        print(f"  peer of {kind}, batch {batch}: {type(error).__name__} {str(error)[:100]}", flush=True)
    return found


def _gathered(data: Paged, layer: int) -> tuple[Tensor, Tensor]:
    """K and V [batch, kv_heads, context, dim]."""
    parts = []
    for kv in (0, 1):
        blocks = data.pool[:, :, layer, kv][data.tables.long()]  # [batch, blocks, kv_heads, slot, dim]
        parts.append(blocks.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous())
    return parts[0], parts[1]


_compiled: list[Any] = []


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=False))
    return _compiled[0]


def _prefill_time(kind: Heads, tokens: int, cached: int, walls: Walls) -> Figure:
    data = paged(kind, [cached + tokens], [tokens], 1, torch.bfloat16, "cuda")
    q = torch.randn(tokens, kind.heads, kind.dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    call = partial(prefill_attention, q, data.pool, 0, data.tables, data.starts, data.start_pos, out, max_tokens=tokens)
    took = time_calls([call])
    operations = 4 * kind.heads * kind.dim * tokens * (cached + (tokens + 1) / 2)
    peers = {}
    if not cached:
        k, v = _gathered(data, 0)
        query = q.transpose(0, 1)[None]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        k, v = (x[:, :, :tokens] for x in (k, v))
        peers["SDPA"] = time_calls([partial(sdpa, query, k, v, is_causal=True, enable_gqa=True)]).median
    share = operations / took.median / walls.matmul
    return Figure(f"prefill {kind}, {tokens} behind {cached}", took, share, "matmul", None, peers)


def _row_times(walls: Walls) -> Iterator[Figure]:
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    for rows in (1, 256, 8192):
        copies = 8
        residual, delta, weight = make(copies, rows, 4096), make(copies, rows, 4096), make(4096)
        out = torch.empty_like(residual)
        calls = [partial(add_rms_norm, residual[i], delta[i], weight, 1e-5, out[i]) for i in range(copies)]
        took = time_calls(calls)
        yield Figure(f"norm {rows} x 4096", took, 4 * residual[0].nbytes / took.median / walls.copy, "copy")
        gate_up, act = make(copies, rows, 2 * 14336), make(copies, rows, 14336)
        took = time_calls([partial(swiglu, gate_up[i], act[i]) for i in range(copies)])
        yield Figure(f"swiglu {rows} x 14336", took, 3 * act[0].nbytes / took.median / walls.copy, "copy")
    for m in (1, 32, 256, 4096):
        copies = 4 if m <= 256 else 1
        x, matrices = make(m, 4096), make(copies, 14336, 4096)
        out = make(m, 14336)
        took = time_calls([partial(linear, x, matrices[i], out) for i in range(copies)])
        peer = time_calls([partial(torch.mm, x, matrices[i].T, out=out) for i in range(copies)])
        least = max(matrices[0].nbytes / walls.read, 2 * m * 4096 * 14336 / walls.matmul)
        figure = Figure(f"linear {m} x 4096 x 14336, batch-invariant", took, least / took.median, "its wall")
        figure.peers["cuBLAS"] = peer.median
        yield figure
