"""Choosing one token for each row of logits on CPU: bans, biases, penalties, temperature, min-p, top-k, top-p, and a
draw that the caller gives; in the order of vLLM's sampler (docs.vllm.ai, vllm.v1.sample.sampler), which greedy rows
follow up to the penalties.

A weight is exp((logit - best) / temperature), so the best token weighs exactly 1. Min-p, top-k and top-p set the
weights of what they cut to 0; the token is the first by id at which the running sum passes draw * total. Nothing is
sorted: histograms over the bits of the weights find where a cut lies.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from kernels.micro import fetch_add, pointer, row_peak, softmax_row

CHUNK = 1024
"""Weights summed together; a draw walks over chunks first."""
_BINS = 1024
"""Of a histogram over ten bits of a weight."""
_COLDEST = 1e-30
"""Temperatures below are this one: every other token's weight is 0 then anyway."""


def scratch_floats(vocab: int) -> int:
    """Floats of scratch that one thread needs: weights, chunk sums (float64), histogram (two float64 a bin)."""
    padded = -(-vocab // CHUNK) * CHUNK
    return padded + 2 * (padded // CHUNK) + 4 * _BINS


@njit(error_model="numpy")
def _penalize(row, marks, ids, prompt, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    """Penalties in the row's logits for the tokens `ids`, of which the first `prompt` are the prompt's: repetition for
    all of them, then frequency and presence for the others (vLLM, `apply_penalties`).

    Each token is changed once, by what depends on the row alone. marks: int32 [vocab] of scratch with any content;
    bit 0 says that a token is in the prompt, the higher bits count it in the output.
    """
    for i in range(len(ids)):
        marks[ids[i]] = 0
    for i in range(prompt):
        marks[ids[i]] = 1
    for i in range(prompt, len(ids)):
        marks[ids[i]] += 2
    for i in range(len(ids)):
        mark = marks[ids[i]]
        if mark != 0:
            marks[ids[i]] = 0
            x = row[ids[i]]
            x = x / repetition if x > np.float32(0.0) else x * repetition
            if mark > 1:
                x -= frequency * np.float32(mark >> 1)
                x -= presence
            row[ids[i]] = x


@njit
def find_best(address, logits, vocab):  # type: ignore[no-untyped-def]
    """(id of the largest finite logit, lowest first, or -1; whether all are finite or -inf)."""
    peak, zero = row_peak(address, vocab // 16)
    best, clean, first = -1, True, 0
    if zero == np.float32(0.0):
        # All finite, as in every healthy model: the rest of the row, then the place of the peak.
        for i in range(vocab // 16 * 16, vocab):
            x = logits[i]
            clean = clean and x - x == np.float32(0.0)
            peak = max(peak, x)
        if clean:
            while logits[first] != peak:
                first += 1
            return first, True
    peak, clean = np.float32(-np.inf), True
    for i in range(vocab):
        x = logits[i]
        if x > peak:
            if x == np.float32(np.inf):
                clean = False
            else:
                peak = x
                best = i
        elif x != x:
            clean = False
    return best, clean


@njit
def sum_chunks(weights, sums, chunks):  # type: ignore[no-untyped-def]
    """sums[c] = sum of chunk c, in float64 over four chains; returns the sum of all."""
    total = 0.0
    for c in range(chunks):
        a, b, d, e = 0.0, 0.0, 0.0, 0.0
        for i in range(c * CHUNK, (c + 1) * CHUNK, 4):
            a += weights[i]
            b += weights[i + 1]
            d += weights[i + 2]
            e += weights[i + 3]
        sums[c] = (a + b) + (d + e)
        total += sums[c]
    return total


@njit
def _cut(weights, bits, size, bin_counts, bin_sums, most, mass):  # type: ignore[no-untyped-def]
    """Zero all weights but the fewest best that are `most` many or reach `mass` together; equals stay by lowest id.

    The border is found by its bits, ten at a time: floats in [0, 1] order like the integers that they are stored as.
    """
    count, total, border = 0, 0.0, 0
    for shift in (20, 10, 0):
        for b in range(_BINS):
            bin_counts[b] = 0.0
            bin_sums[b] = 0.0
        for i in range(size):
            # What is cut already is passed over: its one bin would be a chain through memory.
            if bits[i] != 0 and bits[i] >> (shift + 10) == border:
                b = (bits[i] >> shift) & (_BINS - 1)
                bin_counts[b] += 1.0
                bin_sums[b] += weights[i]
        b = _BINS - 1
        while b > 0 and count + bin_counts[b] < most and total + bin_sums[b] < mass:
            count += int(bin_counts[b])
            total += bin_sums[b]
            b -= 1
        border = border << 10 | b
        if border == 0:
            return  # the least weight that is not 0 has higher bits
    done = False
    for i in range(size):
        if bits[i] < border or (done and bits[i] == border):
            weights[i] = np.float32(0.0)
        elif bits[i] == border:
            count += 1
            total += weights[i]
            done = count >= most or total >= mass


@njit
def _draw(weights, sums, chunks, target):  # type: ignore[no-untyped-def]
    """The first id whose running sum is over `target`; the last id with a weight when rounding leaves none."""
    running = 0.0
    c = 0
    while c < chunks - 1 and running + sums[c] <= target:
        running += sums[c]
        c += 1
    last = -1
    for i in range(c * CHUNK, chunks * CHUNK):
        if weights[i] > 0.0:
            last = i
            running += weights[i]
            if running > target:
                return i
    i = c * CHUNK - 1
    while last < 0:
        if weights[i] > 0.0:
            last = i
        i -= 1
    return last


@cfunc("void(int64, int64)", cache=True, error_model="numpy")
def sample_body(block, thread):  # type: ignore[no-untyped-def]
    """Arguments: logits [rows, vocab], rows, vocab, settings float64 [rows, 8] of (temperature, top_k, top_p, min_p,
    draw, repetition, presence, frequency), where each row's banned ids begin int64 [rows + 1], banned ids, where its
    biases begin int64 [rows + 1], their ids, their amounts float32, where its history begins int64 [rows + 1],
    histories, how much of it is the prompt int64 [rows], out int64 [rows], scratch, its floats a thread.

    Temperature 0 is greedy. The logits of banned ids become -inf. Penalties are read where a row has a history.
    """
    g = carray(pointer(block), 17, np.int64)
    rows, vocab = g[3], g[4]
    logits = carray(pointer(g[2]), (rows, vocab), np.float32)
    settings = carray(pointer(g[5]), (rows, 8), np.float64)
    bans = carray(pointer(g[6]), rows + 1, np.int64)
    banned = carray(pointer(g[7]), bans[rows], np.int64)
    biases = carray(pointer(g[8]), rows + 1, np.int64)
    biased = carray(pointer(g[9]), biases[rows], np.int64)
    amounts = carray(pointer(g[10]), biases[rows], np.float32)
    histories = carray(pointer(g[11]), rows + 1, np.int64)
    history = carray(pointer(g[12]), histories[rows], np.int64)
    prompts = carray(pointer(g[13]), rows, np.int64)
    out = carray(pointer(g[14]), rows, np.int64)
    chunks = (vocab + CHUNK - 1) // CHUNK
    size = chunks * CHUNK
    mine = g[15] + 4 * g[16] * thread
    weights = carray(pointer(mine), size, np.float32)
    bits = carray(pointer(mine), size, np.int32)
    sums = carray(pointer(mine + 4 * size), chunks, np.float64)
    bin_counts = carray(pointer(mine + 4 * size + 8 * chunks), _BINS, np.float64)
    bin_sums = carray(pointer(mine + 4 * size + 8 * chunks + 8 * _BINS), _BINS, np.float64)
    while True:
        r = fetch_add(block, 1)
        if r >= rows:
            return
        row = logits[r]
        for i in range(bans[r], bans[r + 1]):
            row[banned[i]] = np.float32(-np.inf)
        for i in range(biases[r], biases[r + 1]):
            row[biased[i]] += amounts[i]
        if histories[r] < histories[r + 1]:
            ids = history[histories[r] : histories[r + 1]]
            repetition, presence, frequency = settings[r, 5], settings[r, 6], settings[r, 7]
            _penalize(row, bits, ids, prompts[r], np.float32(repetition), np.float32(presence), np.float32(frequency))
        best, clean = find_best(g[2] + 4 * r * vocab, row, vocab)
        temperature, top_k, top_p, min_p = settings[r, 0], int(settings[r, 1]), settings[r, 2], settings[r, 3]
        if best < 0 or not clean or temperature == 0.0 or top_k == 1:
            out[r] = max(best, 0)
            continue
        peak = row[best]
        inverse = np.float32(1.0 / max(temperature, _COLDEST))
        for i in range(vocab):
            weights[i] = (row[i] - peak) * inverse
        for i in range(vocab, size):
            weights[i] = np.float32(-np.inf)
        softmax_row(mine, size // 16, np.float32(0.0))
        if min_p > 0.0:
            least = np.float32(min_p)
            for i in range(size):
                weights[i] = weights[i] if weights[i] >= least else np.float32(0.0)
        total = sum_chunks(weights, sums, chunks)
        if 0 < top_k < vocab:
            _cut(weights, bits, size, bin_counts, bin_sums, top_k, np.inf)
            total = sum_chunks(weights, sums, chunks)
        if top_p < 1.0:
            _cut(weights, bits, size, bin_counts, bin_sums, size, top_p * total)
            total = sum_chunks(weights, sums, chunks)
        out[r] = _draw(weights, sums, chunks, settings[r, 4] * total)
