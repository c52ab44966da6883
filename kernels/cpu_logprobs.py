"""Log-probabilities of chosen tokens and of the likeliest ones on CPU: log softmax of a row of logits as they are.

A value is (logit - peak) - log(sum of exp(logit - peak)), the sum in the order of `kernels.cpu_sample.sum_chunks`, so
that a row's values depend on that row alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels.cpu_sample import CHUNK, find_best, sum_chunks
from kernels.micro import fetch_add, pointer, softmax_row

FLOOR = -9999.0
"""What -inf and NaN are told as: JSON has neither."""


def scratch_floats(vocab: int) -> int:
    """Floats of scratch that one thread needs: weights and chunk sums (float64)."""
    padded = -(-vocab // CHUNK) * CHUNK
    return padded + 2 * (padded // CHUNK)


@njit
def _select_top(row, most, ids, values):  # type: ignore[no-untyped-def]
    """The `most` largest of the row into values and ids, the largest first, equals by lowest id; NaN counts as -inf."""
    count = 0
    for i in range(len(row)):
        x = row[i] if row[i] == row[i] else np.float32(-np.inf)
        if count == most and x <= values[most - 1]:
            continue
        place = count if count < most else most - 1
        while place > 0 and x > values[place - 1]:
            values[place] = values[place - 1]
            ids[place] = ids[place - 1]
            place -= 1
        values[place] = x
        ids[place] = i
        count = min(count + 1, most)


@njit
def _told(logit, peak, log_total):  # type: ignore[no-untyped-def]
    value = (np.float64(logit) - np.float64(peak)) - log_total
    return np.float32(value if value > FLOOR else FLOOR)


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def logprobs_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: logits [rows, vocab], rows, vocab, chosen ids int64 [rows], how many of the likeliest are wanted int64
    [rows] (at most `width` and vocab), width, their ids int64 [rows, width], values float32 [rows, 1 + width] of the
    chosen token and then of those, scratch, its floats a thread.
    """
    g = carray(pointer(block), 12, np.int64)
    rows, vocab, width = g[3], g[4], g[7]
    logits = carray(pointer(g[2]), (rows, vocab), np.float32)
    chosen = carray(pointer(g[5]), rows, np.int64)
    wanted = carray(pointer(g[6]), rows, np.int64)
    ids = carray(pointer(g[8]), (rows, width), np.int64)
    values = carray(pointer(g[9]), (rows, 1 + width), np.float32)
    chunks = (vocab + CHUNK - 1) // CHUNK
    size = chunks * CHUNK
    mine = g[10] + 4 * g[11] * thread
    weights = carray(pointer(mine), size, np.float32)
    sums = carray(pointer(mine + 4 * size), chunks, np.float64)
    while True:
        r = fetch_add(block, 1)
        if r >= rows:
            return
        row, most = logits[r], wanted[r]
        best, clean = find_best(g[2] + 4 * r * vocab, row, vocab)
        peak, log_total = np.float32(0.0), np.nan
        if best >= 0 and clean:
            peak = row[best]
            for i in range(vocab):
                weights[i] = row[i] - peak
            for i in range(vocab, size):
                weights[i] = np.float32(-np.inf)
            softmax_row(mine, size // 16, np.float32(0.0))
            log_total = np.log(sum_chunks(weights, sums, chunks))
        values[r, 0] = _told(row[chosen[r]], peak, log_total)
        if most > 0:
            _select_top(row, most, ids[r], values[r, 1:])
            for i in range(1, 1 + most):
                values[r, i] = _told(values[r, i], peak, log_total)
