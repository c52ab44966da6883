"""Attention of decode rows (one query token a row) over a paged KV pool, split along the context.

Flash-decoding (Dao, Haziza, Massa, Sizov 2023) with the online softmax of Milakov and Gimelshein 2018. The work is
reading K and V once at the memory's pace:

- One program has all query heads of one KV head, so K and V come in once for the whole group. The group is padded to
  16 rows, the height of the tensor core's product; that product is a small part of what the reads take.
- A tile is TILE positions of several blocks in one gather; the next tiles are on their way (num_stages, asynchronous
  copies of 16 bytes a thread) while this one is multiplied. One loop with a mask serves whole and last tiles: a last
  tile of its own would wait for its loads with nothing beside it.
- A row's context is cut into at most `splits` equal pieces, of at least `least` positions, by its own length alone. The
  programs of pieces that it has not return at once, so the grid depends on shapes only and fits a CUDA graph.
- Pieces are merged by the program that ends last (an atomic count for each row and KV head tells it that it is), which
  saves a launch and the gap before it: much of the time of a single row. Whoever is last reads all pieces in their
  order, so the result is the same bit for bit. Where the pieces of a group are too much for one program, a second
  kernel with a program for each head does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import tuned
from kernels.triton.attention_merge import (
    MERGE_WARPS,
    Scratch,
    in_place_step,
    merge,
    merge_constexprs,
    merge_kernel,
    pieces,
)
from kernels.triton.compiled import Variant
from kernels.triton.tuned import DecodeLaunch, Heads, round_up_power

LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["table_stride", "splits", "least", "window"],
    do_not_specialize_on_alignment=["tables", "lengths"],
)
def decode_kernel(
    q,
    pool,
    tables,
    lengths,
    out,
    parts,
    weights,
    arrived,
    scale,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    layer_offset,
    value_offset,
    splits,
    least,
    window,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_GROUP: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (row, KV head, piece).

    STEP: pieces merged at a time, 0 where `merge_kernel` merges; LANES: the group, rounded up to a power of two; scale:
    of scores, times log2(e). Strides and offsets count elements.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    g = tl.arange(0, PAD_GROUP)
    d = tl.arange(0, PAD_DIM)
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    spots = g[:, None] * DIM + d[None, :]
    out_row = out + row.to(tl.int64) * out_stride + head * (GROUP * DIM)
    if length <= 0:
        if split == 0:
            tl.store(out_row + spots, tl.full([PAD_GROUP, PAD_DIM], 0.0, out.dtype.element_ty), mask=inside)
        return
    first, piece, used = pieces(length, splits, least, window, TILE)
    if split >= used:
        return
    begin = first + split * piece
    end = tl.minimum(begin + piece, length)
    seen = 0
    if window > 0:
        seen = tl.maximum(length - window, 0)

    query = tl.load(q + row.to(tl.int64) * q_stride + head * (GROUP * DIM) + spots, mask=inside, other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    keys = pool + head.to(tl.int64) * head_stride + layer_offset
    most = tl.full([PAD_GROUP], float("-inf"), tl.float32)
    total = tl.full([PAD_GROUP], 0.0, tl.float32)
    acc = tl.full([PAD_GROUP, PAD_DIM], 0.0, tl.float32)
    ahead = begin + tl.arange(0, TILE)
    block_ahead = tl.load(table + ahead // BLOCK, mask=ahead < end, other=0)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        valid = (position >= seen) & (position < end)
        # Slots that are not read may hold anything, NaN too: they come in as zeros.
        load = valid[:, None] & (d < DIM)[None, :]
        # Block ids are carried from one iteration to the next. Looked up in the same one they would be a load that
        # other loads depend on, for which Triton's pipeline gives up half of its stages.
        block = block_ahead.to(tl.int64)
        ahead = position + TILE
        block_ahead = tl.load(table + ahead // BLOCK, mask=ahead < end, other=0)
        at = (block * block_stride + position % BLOCK * DIM)[:, None] + d[None, :]
        k = tl.load(keys + at, mask=load, other=0.0)
        v = tl.load(keys + value_offset + at, mask=load, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        old = tl.exp2(most - now)
        p = tl.exp2(scores - now[:, None])
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        most = now
    acc = acc / total[:, None]

    if used == 1:
        tl.store(out_row + spots, acc.to(out.dtype.element_ty), mask=inside)
        return
    pair = row.to(tl.int64) * tl.num_programs(1) + head
    parts += pair * splits * (GROUP * DIM)
    weights += pair * splits * GROUP
    tl.store(parts + split * (GROUP * DIM) + spots, acc, mask=inside)
    tl.store(weights + split * GROUP + g, most + tl.log2(total), mask=g < GROUP)
    if STEP > 0:
        # All threads' stores come before the count (barrier), which releases them; the last one acquires all.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + pair, 1, sem="acq_rel", scope="gpu")
        if before == used - 1:
            tl.debug_barrier()
            merge(parts, weights, out_row, used, 0, GROUP, LANES, GROUP, DIM, PAD_DIM, STEP)
            tl.store(arrived + pair, 0)


def decode_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    window: int = 0,
    splits: int = 0,
    scratch: Scratch | None = None,
    launch: DecodeLaunch | None = None,
) -> None:
    """out[i] = attention of query token q[i] over the first lengths[i] positions of row i's blocks; zeros for length 0.

    q, out: [rows, heads, dim], dense within a row; pool: [block, kv_head, layer, 2, slot, dim], dense within a block's
    [slot, dim], of q's dtype (bfloat16, float16 or float32); tables: int32 [rows, max_blocks]; lengths: int32 [rows].
    Scores are scaled by dim ** -0.5; window > 0: only the `window` latest positions are seen.

    splits: most pieces of a row; 0 leaves it to the class of the batch. With a number, a row's result is the same bit
    for bit in every batch. scratch: memory to use again, which must suffice. A CUDA graph should be given one: it would
    keep the memory of each launch that makes its own, and clear its counts each time. launch: instead of the tuned one.
    """
    rows, heads, dim = q.shape
    kv_heads, block = pool.shape[1], pool.shape[4]
    group = heads // kv_heads
    if rows == 0:
        return
    kinds = Heads(tuned.dtype_name(q.dtype), dim, group, block)
    if launch is None:
        capacity = tables.shape[1] * block
        launch = tuned.decode_launch(tuned.device_of(q.device), kinds, rows, kv_heads, capacity, splits)
    if scratch is None:
        scratch = Scratch.make(rows, heads, dim, launch.splits, q.device)
    constexprs = decode_constexprs(kinds, launch)
    decode_kernel[(rows, kv_heads, launch.splits)](
        q,
        pool,
        tables,
        lengths,
        out,
        scratch.parts,
        scratch.weights,
        scratch.arrived,
        dim**-0.5 * LOG2_E,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        pool.stride(0),
        pool.stride(1),
        layer * pool.stride(2),
        pool.stride(3),
        launch.splits,
        launch.least,
        window,
        **constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if launch.splits > 1 and constexprs["STEP"] == 0:
        merge_kernel[(rows, heads)](
            lengths,
            out,
            scratch.parts,
            scratch.weights,
            out.stride(0),
            launch.splits,
            launch.least,
            window,
            **merge_constexprs(kinds, launch),
            num_warps=MERGE_WARPS,
        )


def decode_constexprs(heads: Heads, launch: DecodeLaunch) -> dict[str, Any]:
    dim, lanes = round_up_power(heads.dim), round_up_power(heads.group)
    return {
        "DIM": heads.dim,
        "PAD_DIM": dim,
        "GROUP": heads.group,
        "PAD_GROUP": max(16, lanes),
        "LANES": lanes,
        "BLOCK": heads.block,
        "TILE": launch.tile,
        "STEP": in_place_step(heads, launch),
    }


def variants() -> Iterator[Variant]:
    """Every kind of head that is supported, with pieces merged in place and by the second kernel, as the rule launches
    a single short and a single long row on an H200.
    """
    strides = ("q_stride", "out_stride", "block_stride", "head_stride", "layer_offset", "value_offset")
    numbers = dict.fromkeys(strides, "i32:16") | {"scale": "fp32"}
    numbers |= dict.fromkeys(("table_stride", "splits", "least", "window"), "i32")
    scratch = {"parts": "*fp32:16", "weights": "*fp32:16", "arrived": "*i32:16"}
    tables = dict.fromkeys(("tables", "lengths"), "*i32")
    for heads in tuned.SUPPORTED:
        rows = dict.fromkeys(("q", "pool", "out"), f"*{heads.dtype}:16") | tables
        for capacity in (1024, 1 << 17):
            launch = tuned.decode_rule(heads, 1, capacity, processors=132)
            constexprs = decode_constexprs(heads, launch)
            if capacity == 1024 or constexprs["STEP"] == 0:
                yield Variant(
                    f"decode {heads}, merged {'in place' if constexprs['STEP'] else 'apart'}",
                    decode_kernel,
                    rows | scratch | numbers,
                    constexprs,
                    launch.num_warps,
                    launch.num_stages,
                )
        if constexprs["STEP"] == 0 and heads.block == 16:
            arguments = rows | scratch | numbers
            yield Variant(
                f"merge {heads}",
                merge_kernel,
                {name: arguments[name] for name in merge_kernel.arg_names if name in arguments},
                merge_constexprs(heads, launch),
                MERGE_WARPS,
            )
