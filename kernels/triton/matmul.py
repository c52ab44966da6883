"""A linear layer whose results are the same bit for bit in every batch.

What decides a result's bits is its order of additions, and that is chosen by the weight's shape and type alone, never
by the number of rows (`Order`):

- Within a tensor-core product the hardware adds TILE_DEPTH / 16 groups of 16 products to the accumulator, in order. All
  tiles use one and the same instruction for it, `wgmma` of 64 weight columns (m64nRk16): the weight is its first
  operand and the rows of x its second, so a batch of one wastes 15 of 16 rows instead of 63 of 64, and how many rows a
  tile has (R) does not enter a result. Float32 goes through fused multiply-adds, ascending.
- Over the depth, each of `splits` equal pieces is one ascending chain from 0.
- The chains are added from the first to the last; then comes the bias; then one rounding to out's type.

Few rows are bound by reading the weight: a program for each piece, tiles of 64 columns, so that a small layer too has
its bytes read by all processors at once. The program of a tile that ends last adds the pieces that it finds in memory.
Many rows are bound by products: a program goes through all pieces itself and adds them in registers: the same numbers
in the same order, with large tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant

PROGRAMS = 128
"""Programs that a layer should have for few rows, about the processors of an H100 or H200."""
MAX_SPLITS = 4
_LEAST_DEPTH = 512
"""Of a piece."""
_NARROW = 64
"""Columns of a tile for few rows: what `wgmma` takes at least."""
FEW_ROWS = 256
_MAX_TILES = 2 * PROGRAMS


@dataclass(frozen=True, slots=True)
class Order:
    """What a result's bits depend on besides its numbers: pieces of the depth, and the depth of one product."""

    splits: int
    tile_depth: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work is laid out; results do not depend on it. parallel: a program has one piece of a tile, not all."""

    rows: int
    columns: int
    parallel: bool
    num_warps: int
    num_stages: int


@triton.jit
def _chain(
    x_at,
    w_at,
    x_inside,
    w_inside,
    split,
    depth,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Piece `split` of the depth: float32 [TILE_COLUMNS, TILE_ROWS]."""
    k = tl.arange(0, TILE_DEPTH)
    blocks = tl.cdiv(depth, TILE_DEPTH)
    piece = tl.cdiv(blocks, SPLITS)
    acc = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    for block in range(split * piece, tl.minimum(split * piece + piece, blocks)):
        start = block * TILE_DEPTH
        if EVEN:
            w = tl.load(w_at + start, mask=w_inside, other=0.0)
            x = tl.load(x_at + start, mask=x_inside, other=0.0)
        else:
            within = start + k < depth
            w = tl.load(w_at + start, mask=w_inside & within[None, :], other=0.0)
            x = tl.load(x_at + start, mask=x_inside & within[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    pieces,
    arrived,
    rows,
    columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (tile, piece where PARALLEL). EVEN: depth is a multiple of TILE_DEPTH; BIAS: there is one."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, TILE_ROWS), tl.cdiv(columns, TILE_COLUMNS)
    # Tiles that run at the same time share rows and columns in the second-level cache.
    at_column, at_row = tl.swizzle2d(tile // row_tiles, tile % row_tiles, column_tiles, row_tiles, 8)
    n = at_column * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    m = at_row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    k = tl.arange(0, TILE_DEPTH)
    w_inside, x_inside = (n < columns)[:, None], (m < rows)[None, :]
    w_at = weight + n.to(tl.int64)[:, None] * weight_stride + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    if PARALLEL:
        split = tl.program_id(1)
        acc = _chain(x_at, w_at, x_inside, w_inside, split, depth, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, SPLITS, EVEN)
        spots = tl.arange(0, TILE_COLUMNS)[:, None] * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
        pieces += tile.to(tl.int64) * (SPLITS * TILE_COLUMNS * TILE_ROWS) + spots
        tl.store(pieces + split * (TILE_COLUMNS * TILE_ROWS), acc)
        # All threads' stores come before the count (barrier), which releases them; the last one acquires all.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrived + tile, 0)
        # Past the first-level cache: other processors wrote them during this launch.
        total = tl.load(pieces, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            total += tl.load(pieces + other * (TILE_COLUMNS * TILE_ROWS), cache_modifier=".cg")
    else:
        total = _chain(x_at, w_at, x_inside, w_inside, 0, depth, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, SPLITS, EVEN)
        for split in range(1, SPLITS):
            total += _chain(
                x_at, w_at, x_inside, w_inside, split, depth, TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, SPLITS, EVEN
            )
    if BIAS:
        total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
    spots = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(out + spots, total.to(out.dtype.element_ty), mask=w_inside & x_inside)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room for the pieces of one launch of any shape at a time: launches that may overlap need one each.

    pieces float32, 16 MiB; arrived int32, all zeros between launches.
    """

    pieces: Tensor
    arrived: Tensor

    @classmethod
    def make(cls, device: torch.device | str, rows: int = FEW_ROWS) -> Scratch:
        """rows: at least those of launches that have no more than FEW_ROWS."""
        row_tiles = _up(min(rows, FEW_ROWS), _NARROW) // _NARROW
        floats = _MAX_TILES * _NARROW * (_NARROW * row_tiles)
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(_MAX_TILES * row_tiles, dtype=torch.int32, device=device),
        )


def linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, scratch: Scratch | None = None) -> None:
    """out [rows, N] = x [rows, K] @ weight.T + bias, for weight [N, K] of x's type (bfloat16, float16 or float32).

    Dense within a row, any row strides; bias: [N]; sums are float32. A row's result depends on that row alone, bit for
    bit. scratch: memory to use again; a captured graph should be given one.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    if rows == 0 or columns == 0:
        return
    order = order_of(columns, depth, x.dtype)
    tiles = tiles_of(rows, order, x.dtype)
    if tiles.parallel and scratch is None:
        scratch = Scratch.make(x.device, rows)
    count = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    linear_kernel[(count, order.splits if tiles.parallel else 1)](
        x,
        weight,
        bias,
        out,
        scratch.pieces if scratch else None,
        scratch.arrived if scratch else None,
        rows,
        columns,
        depth,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        **constexprs_of(order, tiles, depth, bias is not None),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def order_of(columns: int, depth: int, dtype: torch.dtype) -> Order:
    """Pieces are doubled until a batch of one row has PROGRAMS programs, or they would become too short."""
    splits = 1
    while (
        splits < MAX_SPLITS and triton.cdiv(columns, _NARROW) * splits < PROGRAMS and depth >= 2 * splits * _LEAST_DEPTH
    ):
        splits *= 2
    return Order(splits, 32 if dtype is torch.float32 else 64)


def tiles_of(rows: int, order: Order, dtype: torch.dtype) -> Tiles:
    if rows <= FEW_ROWS or dtype is torch.float32:
        tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else _NARROW
        parallel = rows <= FEW_ROWS and order.splits > 1
        # 60 to 96 KiB of tiles on their way: two or three programs a processor.
        stages = 3 if dtype is torch.float32 else 6
        warps = 8 if dtype is torch.float32 and tile_rows == _NARROW else 4
        return Tiles(tile_rows, _NARROW, parallel, warps, stages)
    return Tiles(128, 128, False, 8, 4)


def constexprs_of(order: Order, tiles: Tiles, depth: int, bias: bool) -> dict[str, Any]:
    return {
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "TILE_DEPTH": order.tile_depth,
        "SPLITS": order.splits,
        "PARALLEL": tiles.parallel,
        "EVEN": depth % order.tile_depth == 0,
        "BIAS": bias,
    }


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def variants() -> list[Variant]:
    """One layer with pieces and one without, each for a decode step, a small batch and a prefill; float32 once."""
    found = []
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    layers = [(torch.bfloat16, 2048, 2048), (torch.bfloat16, 28672, 4096), (torch.float32, 2048, 2048)]
    for dtype, columns, depth in layers:
        order = order_of(columns, depth, dtype)
        for rows in (16, 32, 64, 4096):
            tiles = tiles_of(rows, order, dtype)
            constexprs = constexprs_of(order, tiles, depth, False) | {"bias": None}
            signature = dict.fromkeys(("x", "weight", "out"), f"*{names[dtype]}:16")
            signature |= {"rows": "i32", "columns": "i32:16", "depth": "i32:16"}
            signature |= dict.fromkeys(("x_stride", "weight_stride", "out_stride"), "i32:16")
            if tiles.parallel:
                signature |= {"pieces": "*fp32:16", "arrived": "*i32:16"}
            else:
                constexprs |= {"pieces": None, "arrived": None}
            name = f"linear/{names[dtype]}/{columns}x{depth}/{rows} rows"
            found.append(Variant(name, linear_kernel, signature, constexprs, tiles.num_warps, tiles.num_stages))
    return found
