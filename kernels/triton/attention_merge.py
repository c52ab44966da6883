"""Merge the pieces into which a decode row's context was cut: a softmax over the pieces' own sums of exponentials.

Pieces are taken in their order, STEP at a time, so the result is the same bit for bit whoever merges them and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.tuned import DecodeLaunch, Heads, round_up_power

MERGE_WARPS = 4
MAX_MERGED_IN_PLACE = 32768
"""Most floats (splits * group * dim) that one program merges; beyond, a program for each head does it."""
FLOATS_PER_THREAD = 32
"""Registers for what is read at a time."""


@triton.jit
def merge(
    parts,
    weights,
    out,
    used,
    lane,
    LANES: tl.constexpr,
    PAD_LANES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write out [LANES, DIM] = the merged pieces 0..used of the query heads lane..lane + LANES of a group.

    parts [splits, GROUP, DIM]: each piece's output; weights [splits, GROUP]: log2 of its sum of exponentials.
    """
    i = tl.arange(0, PAD_LANES)
    d = tl.arange(0, PAD_DIM)
    most = tl.full([PAD_LANES], float("-inf"), tl.float32)
    total = tl.full([PAD_LANES], 0.0, tl.float32)
    acc = tl.full([PAD_LANES, PAD_DIM], 0.0, tl.float32)
    for first in range(0, used, STEP):
        piece = first + tl.arange(0, STEP)
        at = piece[:, None] * GROUP + lane + i[None, :]
        there = (piece < used)[:, None] & (i < LANES)[None, :]
        # Past the first-level cache: other processors wrote them during this launch.
        w = tl.load(weights + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        w = tl.where((i < LANES)[None, :], w, 0.0)
        x = tl.load(
            parts + at[:, :, None] * DIM + d[None, None, :],
            mask=there[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        now = tl.maximum(most, tl.max(w, 0))
        old = tl.exp2(most - now)
        share = tl.exp2(w - now[None, :])
        acc = acc * old[:, None] + tl.sum(share[:, :, None] * x, 0)
        total = total * old + tl.sum(share, 0)
        most = now
    merged = acc / total[:, None]
    inside = (i < LANES)[:, None] & (d < DIM)[None, :]
    tl.store(out + i[:, None] * DIM + d[None, :], merged.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pieces(length, splits, least, window, TILE: tl.constexpr):
    """(first position that is read, positions of a piece, number of pieces) of a row of `length` > 0 positions."""
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0) // TILE * TILE
    span = length - first
    even = (span + splits - 1) // splits
    piece = tl.maximum((even + TILE - 1) // TILE * TILE, least)
    return first, piece, (span + piece - 1) // piece


@triton.jit(do_not_specialize=["splits", "least", "window"], do_not_specialize_on_alignment=["lengths"])
def merge_kernel(
    lengths,
    out,
    parts,
    weights,
    out_stride,
    splits,
    least,
    window,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (row, query head): merge its pieces where there are several; one piece alone is in out already."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length <= 0:
        return
    _, _, used = pieces(length, splits, least, window, TILE)
    if used == 1:
        return
    pair = row.to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP
    merge(
        parts + pair * splits * (GROUP * DIM),
        weights + pair * splits * GROUP,
        out + row.to(tl.int64) * out_stride + head * DIM,
        used,
        head % GROUP,
        1,
        1,
        GROUP,
        DIM,
        PAD_DIM,
        STEP,
    )


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room for the pieces of one launch at a time: launches that may overlap need one each.

    parts float32 [rows * kv_heads * splits * group * dim], weights float32 [rows * kv_heads * splits * group], arrived
    int32 [rows * kv_heads], which is all zeros between launches.
    """

    parts: Tensor
    weights: Tensor
    arrived: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Scratch:
        """For launches of at most so many rows and splits (tuned.MAX_SPLITS is the most that a class decides on)."""
        floats = rows * heads * splits
        return cls(
            torch.empty(floats * dim, dtype=torch.float32, device=device),
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(rows * heads, dtype=torch.int32, device=device),
        )


def in_place_step(heads: Heads, launch: DecodeLaunch) -> int:
    """Pieces that a decode program takes at a time when it merges; 0 when `merge_kernel` is to do it."""
    if launch.splits * heads.group * heads.dim > MAX_MERGED_IN_PLACE:
        return 0
    lanes = round_up_power(heads.group) * round_up_power(heads.dim)
    return max(1, FLOATS_PER_THREAD * 32 * launch.num_warps // lanes)


def merge_constexprs(heads: Heads, launch: DecodeLaunch) -> dict[str, Any]:
    dim = round_up_power(heads.dim)
    step = FLOATS_PER_THREAD * 32 * MERGE_WARPS // dim
    return {"DIM": heads.dim, "PAD_DIM": dim, "GROUP": heads.group, "TILE": launch.tile, "STEP": step}
