"""Matrix product of activations with packed weights on CPU: x[M, K] @ w[K, N], float32.

Every element of the result is one chain of fused multiply-adds over ascending K, whatever M, the place of the row
among the M and the number of threads: rows are bit-identical by construction. At few rows the weights are read once
from memory at the speed of the bus; at many rows the tile of 6 x 16 keeps its sums in registers (BLIS, Van Zee and
van de Geijn 2015).
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels.micro import fetch_add, pointer, tile_1, tile_2, tile_3, tile_4, tile_6

PANEL = 16
"""Columns of one packed panel: weights are kept as [ceil(N / PANEL), K, PANEL], the last one padded with zeros."""

_ROW_BLOCK = 96
"""Rows whose activations stay in the second-level cache while the panels pass by."""
_SCRATCH = 6 * PANEL


@njit(inline="always")
def tile_rows(rows, c, ldc, a, lda, b, ldb, depth, accumulate):  # type: ignore[no-untyped-def]
    """C[rows, 16] (+)= A[rows, depth] @ B[depth, 16] for any number of rows. Addresses in bytes, strides in floats."""
    done = 0
    while rows - done >= 6:
        tile_6(c + 4 * ldc * done, ldc, a + 4 * lda * done, lda, b, ldb, depth, accumulate)
        done += 6
    left = rows - done
    if left >= 4:
        tile_4(c + 4 * ldc * done, ldc, a + 4 * lda * done, lda, b, ldb, depth, accumulate)
        done += 4
        left -= 4
    if left == 3:
        tile_3(c + 4 * ldc * done, ldc, a + 4 * lda * done, lda, b, ldb, depth, accumulate)
    elif left == 2:
        tile_2(c + 4 * ldc * done, ldc, a + 4 * lda * done, lda, b, ldb, depth, accumulate)
    elif left == 1:
        tile_1(c + 4 * ldc * done, ldc, a + 4 * lda * done, lda, b, ldb, depth, accumulate)


@cfunc("void(int64)", cache=True, error_model="numpy")
def gemm_body(block):  # type: ignore[no-untyped-def]
    """Arguments: x, ldx, packed, bias (0: none), out, ldout, M, K, N, panels an item. Strides in floats."""
    g = carray(pointer(block), 12, np.int64)
    x, ldx, packed, bias, out, ldout, rows, depth, columns, group = (
        g[2],
        g[3],
        g[4],
        g[5],
        g[6],
        g[7],
        g[8],
        g[9],
        g[10],
        g[11],
    )
    panels = (columns + PANEL - 1) // PANEL
    groups = (panels + group - 1) // group
    blocks = (rows + _ROW_BLOCK - 1) // _ROW_BLOCK
    scratch = np.empty(_SCRATCH, np.float32)
    results = carray(pointer(out), (rows, ldout), np.float32)
    while True:
        item = fetch_add(block, 1)
        if item >= groups * blocks:
            return
        first_row = (item // groups) * _ROW_BLOCK
        end_row = min(first_row + _ROW_BLOCK, rows)
        first_panel = (item % groups) * group
        for panel in range(first_panel, min(first_panel + group, panels)):
            weights = packed + 4 * panel * depth * PANEL
            column = panel * PANEL
            width = min(PANEL, columns - column)
            if bias != 0:
                values = carray(pointer(bias), columns, np.float32)
                for r in range(first_row, end_row):
                    for j in range(column, column + width):
                        results[r, j] = values[j]
            if width == PANEL:
                tile_rows(
                    end_row - first_row,
                    out + 4 * (first_row * ldout + column),
                    ldout,
                    x + 4 * first_row * ldx,
                    ldx,
                    weights,
                    PANEL,
                    depth,
                    bias != 0,
                )
                continue
            for r in range(first_row, end_row):
                for j in range(width):
                    scratch[j] = results[r, column + j]
                tile_1(scratch.ctypes.data, PANEL, x + 4 * r * ldx, ldx, weights, PANEL, depth, bias != 0)
                for j in range(width):
                    results[r, column + j] = scratch[j]


@cfunc("void(int64)", cache=True, error_model="numpy")
def pack_body(block):  # type: ignore[no-untyped-def]
    """Arguments: weights [N, K], packed, first row in packed, N, K, total N: copy rows into their columns of the
    panels.
    """
    g = carray(pointer(block), 7, np.int64)
    source, packed, offset, rows, depth = g[2], g[3], g[4], g[5], g[6]
    weights = carray(pointer(source), (rows, depth), np.float32)
    while True:
        first = fetch_add(block, 1) * PANEL
        if first >= rows:
            return
        for r in range(first, min(first + PANEL, rows)):
            column = offset + r
            panel = carray(pointer(packed + 4 * (column // PANEL) * depth * PANEL), (depth, PANEL), np.float32)
            lane = column % PANEL
            for k in range(depth):
                panel[k, lane] = weights[r, k]
