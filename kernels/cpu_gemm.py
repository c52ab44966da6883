"""Matrix product of activations with packed weights on CPU: x[M, K] @ w[K, N], float32 arithmetic.

Every element of the result is one chain of fused multiply-adds over ascending K, whatever M, the place of the row among
the M, the way the weights are stored and the number of threads: rows are bit-identical by construction.

The tile of 6 x 16 keeps its sums in registers, a block of one panel stays in the first-level cache while the rows pass
by (BLIS, Van Zee and van de Geijn 2015). At few rows the weights come once from memory, and memory must never wait for
arithmetic: each tile asks for its share of the block that comes next, so reading and computing overlap.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels import tiles
from kernels.micro import fetch_add, pointer, swiglu_vectors

PANEL = 16
"""Columns of one packed panel."""
STRIP = 2 * PANEL
"""Columns that are computed together: two panels, gate and up in a fused SwiGLU."""
ROW_BLOCK = 96
"""Rows whose activations stay in the second-level cache while the panels pass by."""
DEPTH_BLOCK = 256
"""Depth of a panel that stays in the first-level cache while the rows pass by. A multiple of every quantisation group
but the one that is the whole depth."""
SCRATCH_FLOATS = ROW_BLOCK * STRIP + DEPTH_BLOCK * PANEL
"""Scratch of one thread."""

F32, F16, BF16, INT8, INT8_SHIFTED, INT4_SHIFTED = range(6)
"""How weights are stored. The integer ones have float32 scales (and offsets) for each group of the depth and column;
packed as [panel, group, (scales[16], offsets[16], codes[group depth, 16])]."""

STORE, ADD, SWIGLU = range(3)
"""What becomes of the product: out = y, out += y, out[j] = silu(y[gate j]) * y[up j]."""

_HINT_BYTES = 1024
"""How far ahead of the tile the lines are asked for at one to three rows."""
_FEW = 3
"""Rows up to which two panels are read side by side. Widened integers then leave reading ahead to the machine."""
_FEW_DEPTH = 64
"""Depth that is widened at a time for so few rows: two panels of it leave the first-level cache to the stream."""
_FEW_HALVES = 8
"""Rows up to which half-width weights are widened in the tile rather than once for all tiles."""


@njit
def tile_rows(rows, c, ldc, a, lda, b, ldb, depth, accumulate):  # type: ignore[no-untyped-def]
    """C[rows, 16] (+)= A[rows, depth] @ B[depth, 16] for any number of rows. Addresses in bytes, strides in floats."""
    step = 4 * ldb
    count = (rows + 5) // 6
    begin = 0
    for i in range(count):
        end = rows * (i + 1) // count
        cc = c + 4 * ldc * begin
        aa = a + 4 * lda * begin
        size = end - begin
        if size == 6:
            tiles.plain_6(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        elif size == 5:
            tiles.plain_5(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        elif size == 4:
            tiles.plain_4(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        elif size == 3:
            tiles.plain_3(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        elif size == 2:
            tiles.plain_2(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        else:
            tiles.plain_1(cc, ldc, aa, lda, b, step, 0, depth, accumulate, 0, 0)
        begin = end


@njit
def _few_rows(rows, c, a, lda, b, gap, depth, half, accumulate):  # type: ignore[no-untyped-def]
    """C[rows, 32] (+)= A @ two panels, gap bytes apart, for one to three rows."""
    hint = b + _HINT_BYTES
    if half:
        if rows == 1:
            tiles.f16_1x2(c, STRIP, a, lda, b, 2 * PANEL, gap, depth, accumulate, hint, 2 * PANEL)
        elif rows == 2:
            tiles.f16_2x2(c, STRIP, a, lda, b, 2 * PANEL, gap, depth, accumulate, hint, 2 * PANEL)
        else:
            tiles.f16_3x2(c, STRIP, a, lda, b, 2 * PANEL, gap, depth, accumulate, hint, 2 * PANEL)
    elif rows == 1:
        tiles.f32_1x2(c, STRIP, a, lda, b, 4 * PANEL, gap, depth, accumulate, hint, 4 * PANEL)
    elif rows == 2:
        tiles.f32_2x2(c, STRIP, a, lda, b, 4 * PANEL, gap, depth, accumulate, hint, 4 * PANEL)
    else:
        tiles.f32_3x2(c, STRIP, a, lda, b, 4 * PANEL, gap, depth, accumulate, hint, 4 * PANEL)


@njit
def _many_rows(rows, c, a, lda, b, depth, half, accumulate, hint, hint_bytes):  # type: ignore[no-untyped-def]
    """C[rows, 16] (+)= A @ one block of one panel, from four rows on (tiles of three to six); the tiles share the hints
    for hint_bytes.
    """
    count = (rows + 5) // 6
    share = hint_bytes // (count * depth)
    begin = 0
    for i in range(count):
        end = rows * (i + 1) // count
        cc = c + 4 * STRIP * begin
        aa = a + 4 * lda * begin
        size = end - begin
        at = hint + i * share * depth
        if half:
            if size == 6:
                tiles.f16_6(cc, STRIP, aa, lda, b, 2 * PANEL, 0, depth, accumulate, at, share)
            elif size == 5:
                tiles.f16_5(cc, STRIP, aa, lda, b, 2 * PANEL, 0, depth, accumulate, at, share)
            elif size == 4:
                tiles.f16_4(cc, STRIP, aa, lda, b, 2 * PANEL, 0, depth, accumulate, at, share)
            else:
                tiles.f16_3(cc, STRIP, aa, lda, b, 2 * PANEL, 0, depth, accumulate, at, share)
        elif count >= 4:
            if size == 6:
                tiles.busy_6(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
            elif size == 5:
                tiles.busy_5(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
            else:
                tiles.busy_4(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
        elif size == 6:
            tiles.f32_6(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
        elif size == 5:
            tiles.f32_5(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
        elif size == 4:
            tiles.f32_4(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
        else:
            tiles.f32_3(cc, STRIP, aa, lda, b, 4 * PANEL, 0, depth, accumulate, at, share)
        begin = end


@njit
def _widen(stored, target, panel, first, count, group):  # type: ignore[no-untyped-def]
    """target[count, 16] = rows [first, first + count) of a panel as float32."""
    if stored == F16:
        tiles.widen_f16(target, panel + 2 * PANEL * first, 2 * PANEL, 0, 0, count)
        return
    if stored == BF16:
        tiles.widen_bf16(target, panel + 2 * PANEL * first, 2 * PANEL, 0, 0, count)
        return
    head = 4 * PANEL if stored == INT8 else 8 * PANEL
    line = PANEL // 2 if stored == INT4_SHIFTED else PANEL
    k = first
    while k < first + count:
        inside = k % group
        run = min(group - inside, first + count - k)
        record = panel + (k // group) * (head + group * line)
        codes = record + head + inside * line
        if stored == INT8:
            tiles.widen_int8(target, codes, line, record, 0, run)
        elif stored == INT8_SHIFTED:
            tiles.widen_int8_shifted(target, codes, line, record, record + 4 * PANEL, run)
        else:
            tiles.widen_int4_shifted(target, codes, line, record, record + 4 * PANEL, run)
        target += 4 * PANEL * run
        k += run


@njit
def _strip(stored, c, wide, a, lda, rows, weights, following, panel_bytes, depth, group, accumulate):  # type: ignore[no-untyped-def]
    """C[rows, 32] (+)= A @ the two panels at `weights`; those at `following` are read next."""
    gap = 4 * PANEL * _FEW_DEPTH
    if rows <= _FEW and stored in (F32, F16):
        _few_rows(rows, c, a, lda, weights, panel_bytes, depth, stored == F16, accumulate)
        return
    if rows <= _FEW:
        for k in range(0, depth, _FEW_DEPTH):
            count = min(_FEW_DEPTH, depth - k)
            _widen(stored, wide, weights, k, count, group)
            _widen(stored, wide + gap, weights + panel_bytes, k, count, group)
            _few_rows(rows, c, a + 4 * k, lda, wide, gap, count, False, accumulate or k > 0)
        return
    half = stored == F16 and rows <= _FEW_HALVES
    for side in range(2):
        panel = weights + side * panel_bytes
        after = weights + panel_bytes if side == 0 else following
        for k in range(0, depth, DEPTH_BLOCK):
            count = min(DEPTH_BLOCK, depth - k)
            offset = panel_bytes * k // depth
            hint_bytes = panel_bytes * count // depth
            hint = after if k + count == depth else panel + offset + hint_bytes
            block = panel + offset
            if stored != F32 and not half:
                _widen(stored, wide, panel, k, count, group)
                block = wide
            target = c + 4 * PANEL * side
            _many_rows(rows, target, a + 4 * k, lda, block, count, half, accumulate or k > 0, hint, hint_bytes)


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def gemm_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: x, ldx, packed, bytes of a panel, how it is stored, group depth, bias (0: none), what becomes of the
    product, out, ldout, M, K, N, scratch. Strides in floats.
    """
    g = carray(pointer(block), 16, np.int64)
    x, ldx, packed, panel_bytes, stored, group, bias = g[2], g[3], g[4], g[5], g[6], g[7], g[8]
    then, out, ldout, rows, depth, columns = g[9], g[10], g[11], g[12], g[13], g[14]
    c = g[15] + 4 * thread * SCRATCH_FLOATS
    wide = c + 4 * ROW_BLOCK * STRIP
    sums = carray(pointer(c), (ROW_BLOCK, STRIP), np.float32)
    results = carray(pointer(out), (rows, ldout), np.float32)
    strips = (columns + STRIP - 1) // STRIP
    total = strips * ((rows + ROW_BLOCK - 1) // ROW_BLOCK)
    item = fetch_add(block, 1)
    while item < total:
        following = fetch_add(block, 1)
        first = (item // strips) * ROW_BLOCK
        count = min(ROW_BLOCK, rows - first)
        strip = item % strips
        column = strip * STRIP
        width = min(STRIP, columns - column)
        if bias != 0:
            values = carray(pointer(bias), columns, np.float32)
            for r in range(count):
                for j in range(width):
                    sums[r, j] = values[column + j]
        here = packed + 2 * strip * panel_bytes
        there = packed + 2 * (following % strips) * panel_bytes
        _strip(stored, c, wide, x + 4 * first * ldx, ldx, count, here, there, panel_bytes, depth, group, bias != 0)
        if then == SWIGLU:
            for r in range(count):
                target = out + 4 * ((first + r) * ldout + strip * PANEL)
                swiglu_vectors(target, c + 4 * STRIP * r, c + 4 * (STRIP * r + PANEL), 1)
        elif then == ADD:
            for r in range(count):
                for j in range(width):
                    results[first + r, column + j] += sums[r, j]
        else:
            for r in range(count):
                for j in range(width):
                    results[first + r, column + j] = sums[r, j]
        item = following


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def embed_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: ids, packed, bytes of a panel, how it is stored, group depth, out, ldout, M, K, scratch.

    out[i] = column ids[i] of the packed matrix.
    """
    g = carray(pointer(block), 12, np.int64)
    packed, panel_bytes, stored, group, out, ldout, rows, depth = g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[10]
    ids = carray(pointer(g[2]), rows, np.int64)
    results = carray(pointer(out), (rows, ldout), np.float32)
    wide = g[11] + 4 * thread * SCRATCH_FLOATS
    while True:
        r = fetch_add(block, 1)
        if r >= rows:
            return
        panel = packed + (ids[r] // PANEL) * panel_bytes
        lane = ids[r] % PANEL
        for k in range(0, depth, DEPTH_BLOCK):
            count = min(DEPTH_BLOCK, depth - k)
            source = panel + 4 * PANEL * k
            if stored != F32:
                _widen(stored, wide, panel, k, count, group)
                source = wide
            columns = carray(pointer(source), (count, PANEL), np.float32)
            for j in range(count):
                results[r, k + j] = columns[j, lane]
