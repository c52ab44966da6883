"""Paged attention of one layer over a whole step on CPU: decode rows and prefill chunks together, in one call.

Work items are (run of query tokens of one row, KV head); all query heads of the KV head share its tiles. Keys are
visited in tiles of KEYS positions, aligned to absolute position 0 and ascending, with the online softmax of
FlashAttention (Dao et al. 2022, algorithm 1). A query's arithmetic depends on its own position and window only:
neither chunk borders, nor batch mates, nor tile partners, nor threads change a bit of its result.

| invariant | why |
| --- | --- |
| block_size % 8 == 0, head_dim % 16 == 0 | patches of the transposition and tiles stay inside a block |
| keys beyond the item's last token are never multiplied | pool memory there may hold anything, even NaN |
| masked scores become exactly 0 | a tile that is wholly masked for a query changes nothing |
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels.cpu_gemm import tile_rows
from kernels.micro import exp_scalar, fetch_add, pointer, softmax_row, transpose_8x8
from kernels.tiles import prefetch_lines

KEYS = 64
"""Key positions of one tile."""
MAX_ROWS = 96
"""Query rows (tokens x heads of a group) of one item, at most, unless the group alone is larger."""
_LOWEST = np.float32(-1e30)


def scratch_floats(rows: int, head_dim: int) -> int:
    """Floats of scratch that one thread needs for items of up to `rows` query rows."""
    return rows * (2 * head_dim + KEYS + 2) + 2 * KEYS * head_dim


@njit(inline="always")
def _gather(target, dim, first, count, base, table, block_size, block_floats):  # type: ignore[no-untyped-def]
    """target[j] = pool row of position first + j, for j < count: block by block, in the order of memory.

    Reading each run once from front to back is what the machine's prefetcher wants: transposing or multiplying straight
    from the pool walks it in strides and takes twice as long.
    """
    j = 0
    while j < count:
        at = first + j
        run = min(block_size - at % block_size, count - j) * dim
        source = carray(
            pointer(base + 4 * (table[at // block_size] * block_floats + (at % block_size) * dim)), run, np.float32
        )
        rows = carray(pointer(target + 4 * j * dim), run, np.float32)
        for i in range(run):
            rows[i] = source[i]
        j += run // dim


@njit(inline="always")
def _transpose(target, source, dim, count):  # type: ignore[no-untyped-def]
    """target[d, j] = source[j, d] for j < count rounded up to 8; target's rows are KEYS long."""
    for j in range(0, count, 8):
        for d in range(0, dim, 8):
            transpose_8x8(target + 4 * (d * KEYS + j), KEYS, source + 4 * (j * dim + d), dim)


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def attention_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: see `kernels.ops.Program.attention`; addresses in bytes, strides in floats."""
    g = carray(pointer(block), 25, np.int64)
    q_base, q_stride, out_base, out_stride, pool = g[2], g[3], g[4], g[5], g[6]
    block_floats, head_floats, layer_offset, kv_floats, block_size = g[7], g[8], g[9], g[10], g[11]
    heads_kv, group, dim, window, num_items = g[12], g[13], g[14], g[15], g[16]
    items = carray(pointer(g[17]), (num_items, 4), np.int64)
    tables = carray(pointer(g[18]), g[19], np.int64)
    scratch_base, scratch_stride, max_rows = g[20], g[21], g[22]
    scale = carray(pointer(g[23]), 1, np.float32)[0]

    mine = scratch_base + 4 * scratch_stride * thread
    queries = mine
    sums = queries + 4 * max_rows * dim
    scores = sums + 4 * max_rows * dim
    keys_t = scores + 4 * max_rows * KEYS
    values = keys_t + 4 * KEYS * dim
    peaks = carray(pointer(values + 4 * KEYS * dim), max_rows, np.float32)
    totals = carray(pointer(values + 4 * (KEYS * dim + max_rows)), max_rows, np.float32)
    q = carray(pointer(queries), (max_rows, dim), np.float32)
    o = carray(pointer(sums), (max_rows, dim), np.float32)
    s = carray(pointer(scores), (max_rows, KEYS), np.float32)

    while True:
        ticket = fetch_add(block, 1)
        if ticket >= num_items * heads_kv:
            return
        item = ticket // heads_kv
        head = ticket % heads_kv
        # first_token: index among the step's tokens; position: of that token in its sequence.
        first_token, tokens, position, table_at = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        table = tables[table_at:]
        rows = tokens * group
        for t in range(tokens):
            source = carray(
                pointer(q_base + 4 * ((first_token + t) * q_stride + head * group * dim)), group * dim, np.float32
            )
            for h in range(group):
                for d in range(dim):
                    q[t * group + h, d] = source[h * dim + d] * scale
        for r in range(rows):
            peaks[r] = _LOWEST
            totals[r] = np.float32(0.0)
            for d in range(dim):
                o[r, d] = np.float32(0.0)

        end = position + tokens
        low = 0
        if window > 0:
            low = max(0, position - window + 1) // KEYS * KEYS
        key_base = pool + 4 * (head * head_floats + layer_offset)
        value_base = key_base + 4 * kv_floats
        for tile in range(low, end, KEYS):
            count = min(KEYS, end - tile)
            _gather(values, dim, tile, count, key_base, table, block_size, block_floats)
            _transpose(keys_t, values, dim, count)
            _gather(values, dim, tile, count, value_base, table, block_size, block_floats)
            vectors = (count + 15) // 16
            for v in range(vectors):
                # Runs of one block are too short for the machine to guess the next: ask while there is work to do.
                ahead = tile + KEYS + 16 * v
                if ahead < end:
                    spot = 4 * (table[ahead // block_size] * block_floats + (ahead % block_size) * dim)
                    prefetch_lines(key_base + spot, dim)
                    prefetch_lines(value_base + spot, dim)
                tile_rows(rows, scores + 64 * v, KEYS, queries, dim, keys_t + 64 * v, KEYS, dim, False)

            for t in range(tokens):
                last = position + t - tile
                begin = 0
                if window > 0:
                    begin = max(0, position + t - window + 1 - tile)
                for h in range(group):
                    r = t * group + h
                    for j in range(max(last + 1, 0), 16 * vectors):
                        s[r, j] = np.float32(-np.inf)
                    for j in range(min(begin, 16 * vectors)):
                        s[r, j] = np.float32(-np.inf)
                    peak, total = softmax_row(scores + 4 * r * KEYS, vectors, peaks[r])
                    if peak != peaks[r]:
                        shrink = exp_scalar(peaks[r] - peak)
                        totals[r] *= shrink
                        for d in range(dim):
                            o[r, d] *= shrink
                        peaks[r] = peak
                    totals[r] += total

            for d in range(0, dim, 16):
                tile_rows(rows, sums + 4 * d, dim, scores, KEYS, values + 4 * d, dim, count, True)

        for t in range(tokens):
            target = carray(
                pointer(out_base + 4 * ((first_token + t) * out_stride + head * group * dim)), group * dim, np.float32
            )
            for h in range(group):
                r = t * group + h
                inverse = np.float32(1.0) / totals[r]
                for d in range(dim):
                    target[h * dim + d] = o[r, d] * inverse
