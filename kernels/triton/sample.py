"""From rows of logits to tokens on a device: the meaning of `kernels.cpu_sample` without a sort, a host or a queue.

Weights are float32, exp((logit - best) / temperature); sums are float64. Four launches, whatever the rows ask for:

1. peak (`kernels.triton.weigh`, as 2): the best finite logit of each part of PART tokens, and whether something in it
   is NaN or +inf.
2. weigh: each part's sum of weights. For a row that is cut (top-k, top-p) its weights too, and how many of them lie
   between two powers of two.
3. collect: those counts tell from which power of two on a cut row keeps everything that it could choose. When that is
   at most PART tokens, as it is unless the distribution is flat, they are copied together.
4. choose: one program a row. A cut row's border is found among what was collected, else among all of its weights:
   floats from 0 to 1 order as their bits do, so that each pass compares with FAN borders and leaves one of FAN pieces.
   The draw walks over what was collected, or over one part of a row that is not cut.

A row reads its logits twice, at the pace of the memory as soon as rows * vocab / PART programs fill the device (one row
of 151,936 is 38 programs a pass); a cut row also writes its weights and reads them once. Choosing is latency, not
bandwidth, for a cut row that was collected: some 8 passes over 16 KiB for each cut. One that could not be (more than
PART tokens in its nucleus) takes as many passes of its one program over all its weights.

A row's token depends on that row alone, bit for bit: every sum has an order that the vocabulary fixes. Against float64
weights (`kernels.reference`) a weight is off by at most 1e-5 of itself (the hardware's 2 ** x of a rounded product),
so a border or a draw nearer than that to a step of the running sum may fall on its other side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant
from kernels.triton.edits import Edits, edit_logits
from kernels.triton.weigh import BANDS, NOWHERE, WARPS, Scratch, row_cuts, row_peak, variants_of, weigh, weights_of

FAN: tl.constexpr = tl.constexpr(8)
SEARCH_TILE: tl.constexpr = tl.constexpr(512)
_ONE_BITS: tl.constexpr = tl.constexpr(0x3F800000)


@triton.jit
def _level(bands, sums, row, part, parts, top_k, top_p, PARTS: tl.constexpr):
    """(last band that a cut row needs, or BANDS - 1 if none is sure; tokens down to it; those before `part`).

    Top-k needs the bands of its best tokens. Top-p needs all but a tail that even its largest values do not make weigh
    more than what may be left out.
    """
    p, j = tl.arange(0, PARTS), tl.arange(0, BANDS)
    at = (row * parts + p)[:, None] * BANDS + j[None, :]
    counts = tl.load(bands + at, mask=(p < parts)[:, None], other=0)
    by_band = tl.sum(counts, 0)
    total = tl.sum(tl.load(sums + row * parts + p, mask=p < parts, other=0.0), 0)
    # Weights of band j are below 2 ** (1 - j).
    most = by_band.to(tl.float64) * tl.exp2((1 - j).to(tl.float32)).to(tl.float64)
    tail = tl.sum(most, 0) - tl.cumsum(most, 0)
    enough = tl.where(top_k > 0, tl.cumsum(by_band, 0) >= top_k, tail <= (1.0 - top_p) * total)
    last = tl.min(tl.where(enough, j, BANDS - 1), 0)
    needed = tl.where((j <= last)[None, :], counts, 0)
    return last, tl.sum(tl.sum(needed, 0), 0), tl.sum(tl.sum(tl.where((p < part)[:, None], needed, 0), 0), 0)


@triton.jit
def collect_kernel(
    settings,
    peaks,
    peak_ids,
    faults,
    weights,
    sums,
    bands,
    ids,
    settings_stride,
    weights_stride,
    vocab,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (row, part): its tokens down to the row's last needed band, behind those of earlier parts, by id.

    Weights go to the room of PART floats at the end of a row of `weights`, ids to `ids` int32 [rows, PART].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    _, _, healthy = row_peak(peaks, peak_ids, faults, row, parts, PARTS)
    draws, cut, top_k, top_p = row_cuts(settings + row * settings_stride, vocab)
    if healthy & draws & cut:
        last, count, before = _level(bands, sums, row, part, parts, top_k, top_p, PARTS)
        if (last < BANDS - 1) & (count <= PART):
            i = part * PART + tl.arange(0, PART)
            weights += row * weights_stride
            w = tl.load(weights + i)
            kept = w.to(tl.int32, bitcast=True) >= (127 - last) << 23
            place = before + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(weights + parts * PART + place, w, mask=kept)
            tl.store(ids + row * PART + place, i, mask=kept)


@triton.jit
def _above(source, count, borders):
    """For each of FAN borders: how many of source[:count] have bits of at least it, and their sum."""
    counts = tl.zeros([SEARCH_TILE, FAN], tl.int32)
    sums = tl.zeros([SEARCH_TILE, FAN], tl.float64)
    for start in range(0, count, SEARCH_TILE):
        i = start + tl.arange(0, SEARCH_TILE)
        w = tl.load(source + i, mask=i < count, other=0.0)
        over = w.to(tl.int32, bitcast=True)[:, None] >= borders[None, :]
        counts += over.to(tl.int32)
        sums += tl.where(over, w[:, None], 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(sums, 0)


@triton.jit
def _search(source, count, low, high, most, mass):
    """The border that keeps the fewest best of source[:count] that are `most` many or reach `mass` together.

    It is `low` or higher; weights of `high` or more are known to be too few. Returns (bits of the border, how many
    weights are above it, their sum, how many are equal to it).
    """
    f = tl.arange(0, FAN)
    while high - low > 1:
        step = (high - low + FAN - 1) // FAN
        counts, sums = _above(source, count, tl.minimum(low + step * (f + 1), high))
        enough = tl.sum(((counts >= most) | (sums >= mass)).to(tl.int32), 0)
        high = tl.minimum(low + step * (enough + 1), high)
        low += step * enough
    counts, sums = _above(source, count, low + (f == 0).to(tl.int32))
    above = tl.sum(tl.where(f == 0, counts, 0), 0)
    return low, above, tl.sum(tl.where(f == 0, sums, 0.0), 0), tl.sum(tl.where(f == 1, counts, 0), 0) - above


@triton.jit
def _step(w, i, border, equals, seen, running, target):
    """One tile of the draw's walk: (first place over the target or NOWHERE, last place that is kept or -1, equals seen,
    running sum). Kept are weights above the border and the first `equals` that are equal to it.
    """
    bits = w.to(tl.int32, bitcast=True)
    equal = (bits == border).to(tl.int32)
    kept = (bits > border) | ((equal == 1) & (seen + tl.cumsum(equal, 0) <= equals))
    share = tl.where(kept, w, 0.0).to(tl.float64)
    over = running + tl.cumsum(share, 0) > target
    first = tl.min(tl.where(kept & over, i, NOWHERE), 0)
    last = tl.max(tl.where(kept, i, -1), 0)
    return first, last, seen + tl.sum(equal, 0), running + tl.sum(share, 0)


@triton.jit
def choose_kernel(
    logits,
    settings,
    peaks,
    peak_ids,
    faults,
    weights,
    sums,
    bands,
    ids,
    out,
    stride,
    settings_stride,
    weights_stride,
    vocab,
    parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, best, healthy = row_peak(peaks, peak_ids, faults, row, parts, PARTS)
    settings += row * settings_stride
    draws, cut, top_k, top_p = row_cuts(settings, vocab)
    if not (healthy & draws):
        tl.store(out + row, tl.where(best == NOWHERE, 0, best).to(tl.int64))
        return
    draw = tl.load(settings + 4)
    lane = tl.arange(0, PART)
    p = tl.arange(0, PARTS)
    part_sums = tl.load(sums + row * parts + p, mask=p < parts, other=0.0)
    total = tl.sum(part_sums, 0)
    if not cut:
        target = draw * total
        weighty = part_sums > 0.0
        part = tl.min(tl.where(weighty & (tl.cumsum(part_sums, 0) > target), p, NOWHERE), 0)
        if part == NOWHERE:
            part = tl.max(tl.where(weighty, p, 0), 0)
        i = part * PART + lane
        x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
        before = tl.sum(tl.where(p < part, part_sums, 0.0), 0)
        first, last, _, _ = _step(weights_of(x, peak, settings), i, 0, 0, 0, before, target)
        tl.store(out + row, tl.where(first == NOWHERE, last, first).to(tl.int64))
        return

    band, count, _ = _level(bands, sums, row, 0, parts, top_k, top_p, PARTS)
    collected = (band < BANDS - 1) & (count <= PART)
    source = weights + row * weights_stride + tl.where(collected, parts * PART, 0)
    count = tl.where(collected, count, vocab)
    border = tl.where(band < BANDS - 1, (127 - band) << 23, 1)
    equals = tl.full([], NOWHERE, tl.int32)
    if top_k > 0:
        border, above, mass, equal = _search(source, count, border, (128 - band) << 23, top_k, float("inf"))
        equals = tl.minimum(top_k - above, equal)
        total = mass + equals * border.to(tl.float32, bitcast=True).to(tl.float64)
    if top_p < 1.0:
        wanted, highest = top_p * total, tl.full([], _ONE_BITS + 1, tl.int32)
        nucleus, above, mass, equal = _search(source, count, border, highest, NOWHERE, wanted)
        if nucleus == border:
            # Rounding must not bring back what top-k left out.
            equal = tl.minimum(equal, equals)
        border = nucleus
        weight = border.to(tl.float32, bitcast=True).to(tl.float64)
        equals = tl.minimum(tl.maximum(tl.ceil((wanted - mass) / weight), 1.0), equal).to(tl.int32)
        total = mass + equals * weight
    target = draw * total
    first, last = tl.full([], NOWHERE, tl.int32), tl.full([], -1, tl.int32)
    seen, start, running = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    while (first == NOWHERE) & (start < count):
        i = start + lane
        w = tl.load(source + i, mask=i < count, other=0.0)
        first, now, seen, running = _step(w, i, border, equals, seen, running, target)
        last = tl.maximum(last, now)
        start += PART
    place = tl.where(first == NOWHERE, last, first)
    if collected:
        place = tl.load(ids + row * PART + place)
    tl.store(out + row, place.to(tl.int64))


def sample(
    logits: Tensor, settings: Tensor, out: Tensor, edits: Edits | None = None, scratch: Scratch | None = None
) -> None:
    """out int64 [rows] = a token for each row of logits float32 [rows, vocab], any row stride, in which edits are left.

    settings: float64 [rows, 8] as `kernels.sampler.SampleTable.settings`: temperature (0: greedy), top_k (0: off),
    top_p (1: off; above 0), min_p (0: off), a draw in [0, 1), repetition, presence and frequency penalty (read where
    edits have a history). Ties go to the lowest id. A row with NaN or +inf is greedy over its finite logits, one
    without any gives token 0.

    No host synchronisation, and launches depend on shapes only; a captured graph must be given its scratch.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    scratch = scratch or Scratch.make(rows, vocab, logits.device)
    if edits is not None:
        edit_logits(logits, settings, edits, scratch.weights.view(torch.int32))
    parts, sizes = weigh(logits, settings, scratch)
    found = (scratch.peaks, scratch.peak_ids, scratch.faults)
    kept = (scratch.weights, scratch.sums, scratch.bands, scratch.ids)
    strides = (settings.stride(0), scratch.weights.stride(0))
    collect_kernel[(rows, parts)](settings, *found, *kept, *strides, vocab, **sizes, num_warps=WARPS)
    choose_kernel[(rows,)](
        logits, settings, *found, *kept, out, logits.stride(0), *strides, vocab, parts, **sizes, num_warps=WARPS
    )


def variants() -> list[Variant]:
    return variants_of({"collect": (collect_kernel, {}), "choose": (choose_kernel, {})})
