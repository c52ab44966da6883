"""Causal attention of chunks of prompts over a paged KV pool: what is cached, and the chunk itself.

FlashAttention-2 (Dao 2023) over pages. One program has a tile of queries: consecutive tokens of a row times the query
heads of one KV head, so that K and V come in once for the group and short chunks still fill the tensor core's rows.
Tiles of keys wholly before the first query need no mask and take a loop of their own; a second one has those at the
diagonal. The longest programs of a row start first. The grid covers the longest row; programs beyond a shorter one
return at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import tuned
from kernels.triton.attention_decode import LOG2_E
from kernels.triton.compiled import Variant
from kernels.triton.tuned import Heads, PrefillLaunch, round_up_power


@triton.jit
def _scan(
    query,
    keys,
    table,
    scale,
    block_stride,
    value_offset,
    begin,
    end,
    asked,
    window,
    most,
    total,
    acc,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Take keys begin..end, begin a multiple of TILE, into the online softmax (most, total, acc) of queries at the
    positions `asked`. Without MASKED, end is a multiple of TILE and every query sees all of these keys.
    """
    d = tl.arange(0, PAD_DIM)
    ahead = begin + tl.arange(0, TILE)
    block_ahead = tl.load(table + ahead // BLOCK, mask=ahead < end, other=0)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        # Carried from one iteration to the next, as in attention_decode.py.
        block = block_ahead.to(tl.int64)
        ahead = position + TILE
        block_ahead = tl.load(table + ahead // BLOCK, mask=ahead < end, other=0)
        at = (block * block_stride + position % BLOCK * DIM)[:, None] + d[None, :]
        if MASKED:
            # Slots that are not read may hold anything, NaN too: they come in as zeros.
            load = (position < end)[:, None] & (d < DIM)[None, :]
            k = tl.load(keys + at, mask=load, other=0.0)
            v = tl.load(keys + value_offset + at, mask=load, other=0.0)
        elif PAD_DIM == DIM:
            k = tl.load(keys + at)
            v = tl.load(keys + value_offset + at)
        else:
            k = tl.load(keys + at, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(keys + value_offset + at, mask=(d < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        if MASKED:
            behind = asked[:, None] - position[None, :]
            visible = behind >= 0
            if WINDOWED:
                visible &= behind < window
            scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1) * scale)
        base = now
        if WINDOWED:
            # A query whose window begins in a later tile has seen nothing yet.
            base = tl.where(now == float("-inf"), 0.0, now)
        old = tl.exp2(most - base)
        p = tl.exp2(scores * scale - base[:, None])
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        most = now
    return most, total, acc


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "starts", "start_pos"],
)
def prefill_kernel(
    q,
    pool,
    tables,
    starts,
    start_pos,
    out,
    scale,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    layer_offset,
    value_offset,
    window,
    DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Program (tile of queries, last first; row; KV head). Line i of a tile is token i // GROUP, head i % GROUP.

    scale: of scores, times log2(e). Strides and offsets count elements.
    """
    row, head = tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = TILE_ROWS // GROUP
    token = tl.load(starts + row)
    count = tl.load(starts + row + 1) - token
    tile = (count + TOKENS - 1) // TOKENS - 1 - tl.program_id(0)
    if tile < 0:
        return
    offset = tl.load(start_pos + row)
    i = tl.arange(0, TILE_ROWS)
    d = tl.arange(0, PAD_DIM)
    nth = tile * TOKENS + i // GROUP
    there = (i < TOKENS * GROUP) & (nth < count)
    inside = there[:, None] & (d < DIM)[None, :]
    line = (token + nth).to(tl.int64)
    column = (head * GROUP + i % GROUP) * DIM
    query = tl.load(q + (line * q_stride + column)[:, None] + d[None, :], mask=inside, other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    keys = pool + head.to(tl.int64) * head_stride + layer_offset

    # Lines of no token see what the last one sees: they are not written, but must not be empty.
    asked = offset + tl.minimum(nth, count - 1)
    first = offset + tile * TOKENS
    end = offset + tl.minimum((tile + 1) * TOKENS, count)
    most = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.full([TILE_ROWS], 0.0, tl.float32)
    acc = tl.full([TILE_ROWS, PAD_DIM], 0.0, tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
    else:
        begin = (first + 1) // TILE * TILE
        most, total, acc = _scan(
            query, keys, table, scale, block_stride, value_offset, 0, begin, asked, window, most, total, acc,
            DIM, PAD_DIM, BLOCK, TILE, False, False,
        )  # fmt: skip
    most, total, acc = _scan(
        query, keys, table, scale, block_stride, value_offset, begin, end, asked, window, most, total, acc,
        DIM, PAD_DIM, BLOCK, TILE, True, WINDOWED,
    )  # fmt: skip
    acc = acc / total[:, None]
    tl.store(out + (line * out_stride + column)[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    start_pos: Tensor,
    out: Tensor,
    *,
    max_tokens: int,
    window: int = 0,
    invariant: bool = False,
    launch: PrefillLaunch | None = None,
) -> None:
    """out[i] = causal attention of the tokens starts[r]..starts[r + 1] of row r, which sit at positions start_pos[r]
    and on, over positions 0 to their own of the row's blocks.

    q, out: [tokens, heads, dim], dense within a token; pool: [block, kv_head, layer, 2, slot, dim], dense within a
    block's [slot, dim], of q's dtype (bfloat16, float16 or float32), K and V of these tokens included; tables: int32
    [rows, max_blocks]; starts: int32 [rows + 1]; start_pos: int32 [rows]. Scores are scaled by dim ** -0.5; window > 0:
    a query sees the `window` latest positions, itself included. Tokens of no row are left alone.

    max_tokens: tokens of the longest row, or more. invariant: results are the same bit for bit in every batch and
    whatever max_tokens is. launch: instead of the tuned one.
    """
    rows, (_, heads, dim) = starts.shape[0] - 1, q.shape
    kv_heads, block = pool.shape[1], pool.shape[4]
    if rows == 0 or max_tokens == 0:
        return
    kinds = Heads(tuned.dtype_name(q.dtype), dim, heads // kv_heads, block)
    if launch is None:
        launch = tuned.prefill_launch(tuned.device_of(q.device), kinds, 0 if invariant else max_tokens)
    tiles = -(-max_tokens // (launch.tile_rows // kinds.group))
    prefill_kernel[(tiles, rows, kv_heads)](
        q,
        pool,
        tables,
        starts,
        start_pos,
        out,
        dim**-0.5 * LOG2_E,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        pool.stride(0),
        pool.stride(1),
        layer * pool.stride(2),
        pool.stride(3),
        window,
        **prefill_constexprs(kinds, launch, window),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def prefill_constexprs(heads: Heads, launch: PrefillLaunch, window: int) -> dict[str, Any]:
    return {
        "DIM": heads.dim,
        "PAD_DIM": round_up_power(heads.dim),
        "GROUP": heads.group,
        "TILE_ROWS": launch.tile_rows,
        "BLOCK": heads.block,
        "TILE": launch.tile,
        "WINDOWED": window > 0,
    }


def variants() -> Iterator[Variant]:
    """Every kind of head that is supported with long rows; with short rows and a window for one block size."""
    strides = ("q_stride", "out_stride", "block_stride", "head_stride", "layer_offset", "value_offset")
    numbers = dict.fromkeys(strides, "i32:16") | {"scale": "fp32", "table_stride": "i32", "window": "i32"}
    tables = dict.fromkeys(("tables", "starts", "start_pos"), "*i32")
    for heads in tuned.SUPPORTED:
        types = dict.fromkeys(("q", "pool", "out"), f"*{heads.dtype}:16") | tables | numbers
        for name, max_tokens, window in (("long", 4096, 0), ("short", 1, 0), ("window", 4096, 1024)):
            if name != "long" and heads.block != 16:
                continue
            launch = tuned.prefill_rule(heads, max_tokens)
            constexprs = prefill_constexprs(heads, launch, window)
            label = f"prefill {heads}, {name}"
            yield Variant(label, prefill_kernel, types, constexprs, launch.num_warps, launch.num_stages)
