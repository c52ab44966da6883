"""From rows of logits to tokens on a device: the meaning of `kernels.cpu_sample` without a sort, a host or a queue.

Weights are float32, exp((logit - best) / temperature); sums are float64. Four launches, whatever the rows ask for:

1. peak: the best finite logit of each part of PART tokens, and whether something in it is NaN or +inf.
2. weigh: each part's sum of weights. For a row that is cut (top-k, top-p) its weights too, and how many of them lie
   between two powers of two.
3. collect: those counts tell from which power of two on a cut row keeps everything that it could choose. When that is
   at most PART tokens, as it is unless the distribution is flat, they are copied together.
4. choose: one program a row. A cut row's border is found among what was collected, else among all of its weights:
   floats from 0 to 1 order as their bits do, so that each pass compares with FAN borders and leaves one of FAN pieces.
   The draw walks over what was collected, or over one part of a row that is not cut.

A row reads its logits twice, at the pace of the memory as soon as rows * vocab / PART programs fill the device (one row
of 151,936 is 38 programs a pass); a cut row also writes its weights and reads them once. Choosing is some 10 us of
latency for a cut row that was collected. One that could not be (more than PART tokens in its nucleus) takes about 9
passes of its one program over all weights: 0.1 ms a row of 151,936, many rows at once.

A row's token depends on that row alone, bit for bit: every sum has an order that the vocabulary fixes. Against float64
weights (`kernels.reference`) a weight is off by at most 1e-5 of itself (the hardware's 2 ** x of a rounded product),
so a border or a draw nearer than that to a step of the running sum may fall on its other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant
from kernels.triton.edits import Edits, edit_logits

PART = 4096
"""Tokens of one program; the most that are collected."""
BANDS: tl.constexpr = tl.constexpr(32)
"""Band j counts weights in [2 ** -j, 2 ** (1 - j)), the last one all that are smaller."""
FAN: tl.constexpr = tl.constexpr(8)
SEARCH_TILE: tl.constexpr = tl.constexpr(512)
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)
_ONE_BITS: tl.constexpr = tl.constexpr(0x3F800000)
_COLDEST: tl.constexpr = tl.constexpr(1e-30)
_WARPS = 8


@triton.jit
def peak_kernel(logits, peaks, peak_ids, faults, stride, vocab, PART: tl.constexpr):
    """Program (row, part): best finite logit or -inf, its lowest id or NOWHERE, whether there is NaN or +inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    finite = (x > float("-inf")) & (x < float("inf"))
    value = tl.where(finite, x, float("-inf"))
    peak = tl.max(value, 0)
    at = row * tl.num_programs(1) + part
    tl.store(peaks + at, peak)
    tl.store(peak_ids + at, tl.min(tl.where(finite & (value == peak), i, NOWHERE), 0))
    tl.store(faults + at, tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0))


@triton.jit
def row_peak(peaks, peak_ids, faults, row, parts, PARTS: tl.constexpr):
    """(best finite logit of the row, its lowest id or NOWHERE, whether the row has a number to weigh others by)."""
    p = tl.arange(0, PARTS)
    inside = p < parts
    at = row * parts + p
    values = tl.load(peaks + at, mask=inside, other=float("-inf"))
    peak = tl.max(values, 0)
    best = tl.min(tl.where(values == peak, tl.load(peak_ids + at, mask=inside, other=NOWHERE), NOWHERE), 0)
    faulty = tl.max(tl.load(faults + at, mask=inside, other=0), 0)
    return peak, best, (best != NOWHERE) & (faulty == 0)


@triton.jit
def _cuts(settings, vocab):
    """(whether the row's settings let it draw, whether it is cut, top_k or 0, top_p)."""
    top_k = tl.load(settings + 1).to(tl.int32)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = tl.load(settings + 2)
    draws = (tl.load(settings) != 0.0) & (tl.load(settings + 1) != 1.0)
    return draws, (top_k > 0) | (top_p < 1.0), top_k, top_p


@triton.jit
def _weigh(x, peak, settings):
    inverse = (1.0 / tl.maximum(tl.load(settings), _COLDEST)).to(tl.float32)
    w = tl.exp((x - peak) * inverse)
    return tl.where(w >= tl.load(settings + 3).to(tl.float32), w, 0.0)


@triton.jit
def weigh_kernel(
    logits,
    settings,
    peaks,
    peak_ids,
    faults,
    weights,
    sums,
    bands,
    stride,
    settings_stride,
    weights_stride,
    vocab,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Program (row, part). PLAIN: sums of exp(logit - best) for all rows; nothing of the settings is read then."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    peak, _, healthy = row_peak(peaks, peak_ids, faults, row, parts, PARTS)
    i = part * PART + tl.arange(0, PART)
    at = row * parts + part
    if PLAIN:
        if healthy:
            x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
            tl.store(sums + at, tl.sum(tl.exp(x - peak).to(tl.float64), 0))
    else:
        settings += row * settings_stride
        draws, cut, _, _ = _cuts(settings, vocab)
        if healthy & draws:
            x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
            w = _weigh(x, peak, settings)
            tl.store(sums + at, tl.sum(w.to(tl.float64), 0))
            if cut:
                tl.store(weights + row * weights_stride + i, w)
                band = tl.minimum(127 - (w.to(tl.int32, bitcast=True) >> 23), BANDS - 1)
                tl.store(bands + at * BANDS + tl.arange(0, BANDS), tl.histogram(band, BANDS))


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
    draws, cut, top_k, top_p = _cuts(settings + row * settings_stride, vocab)
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
    draws, cut, top_k, top_p = _cuts(settings, vocab)
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
        first, last, _, _ = _step(_weigh(x, peak, settings), i, 0, 0, 0, before, target)
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


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one call at a time for at most `rows` rows; calls that may overlap need one each. Any content."""

    weights: Tensor
    """float32 [rows, whole parts and one more]."""
    peaks: Tensor
    """float32 [rows, parts]."""
    peak_ids: Tensor
    """int32 [rows, parts], as faults."""
    faults: Tensor
    sums: Tensor
    """float64 [rows, parts]."""
    bands: Tensor
    """int32 [rows, parts, 32]."""
    ids: Tensor
    """int32 [rows, PART]."""

    @classmethod
    def make(cls, rows: int, vocab: int, device: torch.device | str) -> Scratch:
        parts = triton.cdiv(vocab, PART)

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        return cls(
            room((parts + 1) * PART, dtype=torch.float32),
            room(parts, dtype=torch.float32),
            room(parts, dtype=torch.int32),
            room(parts, dtype=torch.int32),
            room(parts, dtype=torch.float64),
            room(parts, 32, dtype=torch.int32),
            room(PART, dtype=torch.int32),
        )


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
    parts, sizes = find_peaks(logits, scratch)
    found = (scratch.peaks, scratch.peak_ids, scratch.faults)
    kept = (scratch.weights, scratch.sums, scratch.bands)
    strides = (settings.stride(0), scratch.weights.stride(0))
    grid, by_row = (rows, parts), (logits, settings, *found, *kept)
    weigh_kernel[grid](*by_row, logits.stride(0), *strides, vocab, **sizes, PLAIN=False, num_warps=_WARPS)
    collect_kernel[grid](settings, *found, *kept, scratch.ids, *strides, vocab, **sizes, num_warps=_WARPS)
    choose_kernel[(rows,)](
        *by_row, scratch.ids, out, logits.stride(0), *strides, vocab, parts, **sizes, num_warps=_WARPS
    )


def find_peaks(logits: Tensor, scratch: Scratch) -> tuple[int, dict[str, Any]]:
    """Fill the scratch's peaks, peak_ids and faults; (parts of a row, constexprs of the kernels that read them)."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    grid, found = (rows, parts), (scratch.peaks, scratch.peak_ids, scratch.faults)
    peak_kernel[grid](logits, *found, logits.stride(0), vocab, PART, num_warps=_WARPS)
    return parts, {"PART": PART, "PARTS": triton.next_power_of_2(parts)}


def sum_weights(logits: Tensor, scratch: Scratch) -> tuple[int, dict[str, Any]]:
    """As `find_peaks`, and fill sums with those of exp(logit - best) for rows that have a best and no NaN or +inf."""
    parts, sizes = find_peaks(logits, scratch)
    found = (scratch.peaks, scratch.peak_ids, scratch.faults)
    kept = (scratch.weights, scratch.sums, scratch.bands)
    weigh_kernel[(logits.shape[0], parts)](
        logits, None, *found, *kept, logits.stride(0), 0, 0, logits.shape[1], **sizes, PLAIN=True, num_warps=_WARPS
    )
    return parts, sizes


def variants() -> list[Variant]:
    """Vocabularies of 32,000 and of 151,936 tokens (8 and 64 parts)."""
    pointers = {
        "logits": "*fp32:16",
        "settings": "*fp64:16",
        "peaks": "*fp32:16",
        "peak_ids": "*i32:16",
        "faults": "*i32:16",
        "weights": "*fp32:16",
        "sums": "*fp64:16",
        "bands": "*i32:16",
        "ids": "*i32:16",
        "out": "*i64:16",
        "stride": "i32:16",
        "settings_stride": "i32",
        "weights_stride": "i32:16",
        "vocab": "i32:16",
        "parts": "i32",
    }
    found = []
    for parts in (8, 64):
        sizes = {"PART": PART, "PARTS": parts}
        plain = {"PLAIN": True, "settings": None}
        for name, kernel, more in (
            ("peak", peak_kernel, {}),
            ("weigh", weigh_kernel, {"PLAIN": False}),
            ("weigh/plain", weigh_kernel, plain),
            ("collect", collect_kernel, {}),
            ("choose", choose_kernel, {}),
        ):
            constexprs = {key: value for key, value in (sizes | more).items() if key in kernel.arg_names}
            signature = {key: pointers[key] for key in kernel.arg_names if key not in constexprs}
            found.append(Variant(f"sample/{name}/{parts}", kernel, signature, constexprs, _WARPS))
    return found
