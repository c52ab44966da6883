"""Row-wise CPU kernels: RMSNorm, QK-norm with RoPE and KV write, picking rows. A row's result depends on that row
alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels.micro import fetch_add, pointer, sum_of_squares

_ROWS = 8
"""Rows that a thread takes at a time."""


@njit(inline="always")
def _normalize(target, source, weight, count, eps):  # type: ignore[no-untyped-def]
    """target = source / rms(source) * weight over `count` floats at raw addresses (Zhang and Sennrich 2019, equation
    4).
    """
    x = carray(pointer(source), count, np.float32)
    y = carray(pointer(target), count, np.float32)
    w = carray(pointer(weight), count, np.float32)
    mean = sum_of_squares(source, count // 16) / np.float32(count)
    inverse = np.float32(1.0) / np.sqrt(mean + eps)
    for j in range(count):
        y[j] = x[j] * inverse * w[j]


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def rms_norm_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: x, ldx, weight, out, ldout, rows, width, address of eps. Strides in floats."""
    g = carray(pointer(block), 10, np.int64)
    x_base, ldx, weight, out_base, ldout, rows, width = g[2], g[3], g[4], g[5], g[6], g[7], g[8]
    eps = carray(pointer(g[9]), 1, np.float32)[0]
    while True:
        first = fetch_add(block, _ROWS)
        if first >= rows:
            return
        for r in range(first, min(first + _ROWS, rows)):
            _normalize(out_base + 4 * r * ldout, x_base + 4 * r * ldx, weight, width, eps)


@njit(inline="always")
def _rotate(x_base, cos_base, sin_base, dim):  # type: ignore[no-untyped-def]
    """RoPE in place on one head, halves convention: pairs are (d, d + dim / 2) (Su et al. 2021)."""
    half = dim // 2
    x = carray(pointer(x_base), dim, np.float32)
    cos = carray(pointer(cos_base), half, np.float32)
    sin = carray(pointer(sin_base), half, np.float32)
    for d in range(half):
        a = x[d]
        b = x[d + half]
        x[d] = a * cos[d] - b * sin[d]
        x[d + half] = b * cos[d] + a * sin[d]


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def rope_write_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: qkv, row stride, rows, query heads, KV heads, dim, positions, slots (block * size + slot), cos, sin,
    q weight (0: no QK-norm), k weight, address of eps, pool, block floats, head floats, layer offset, kv floats,
    block size.

    Q is rotated in place; K (rotated) and V go to the pool, and K is rotated in place too.
    """
    g = carray(pointer(block), 21, np.int64)
    base, stride, rows, heads_q, heads_kv, dim = g[2], g[3], g[4], g[5], g[6], g[7]
    positions = carray(pointer(g[8]), rows, np.int64)
    slots = carray(pointer(g[9]), rows, np.int64)
    cos_base, sin_base, q_weight, k_weight = g[10], g[11], g[12], g[13]
    eps = carray(pointer(g[14]), 1, np.float32)[0]
    pool, block_floats, head_floats, layer_offset, kv_floats, block_size = g[15], g[16], g[17], g[18], g[19], g[20]
    while True:
        first = fetch_add(block, _ROWS)
        if first >= rows:
            return
        for r in range(first, min(first + _ROWS, rows)):
            table = 4 * positions[r] * (dim // 2)
            for h in range(heads_q + heads_kv):
                at = base + 4 * (r * stride + h * dim)
                if q_weight != 0:
                    _normalize(at, at, q_weight if h < heads_q else k_weight, dim, eps)
                _rotate(at, cos_base + table, sin_base + table, dim)
            slot = (slots[r] // block_size) * block_floats + layer_offset + (slots[r] % block_size) * dim
            for h in range(heads_kv):
                spot = pool + 4 * (slot + h * head_floats)
                source = base + 4 * (r * stride + (heads_q + h) * dim)
                k = carray(pointer(source), dim, np.float32)
                v = carray(pointer(source + 4 * heads_kv * dim), dim, np.float32)
                k_out = carray(pointer(spot), dim, np.float32)
                v_out = carray(pointer(spot + 4 * kv_floats), dim, np.float32)
                for d in range(dim):
                    k_out[d] = k[d]
                    v_out[d] = v[d]


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def pick_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: x, ldx, row numbers, out, ldout, rows, width: out[i] = x[number i]. Strides in floats."""
    g = carray(pointer(block), 9, np.int64)
    ldx, ldout, rows, width = g[3], g[6], g[7], g[8]
    numbers = carray(pointer(g[4]), rows, np.int64)
    while True:
        first = fetch_add(block, _ROWS)
        if first >= rows:
            return
        for r in range(first, min(first + _ROWS, rows)):
            source = carray(pointer(g[2] + 4 * numbers[r] * ldx), width, np.float32)
            target = carray(pointer(g[5] + 4 * r * ldout), width, np.float32)
            for j in range(width):
                target[j] = source[j]
