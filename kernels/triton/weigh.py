"""The first half of sampling: a row's best logit, and what its tokens weigh beside it. `kernels.triton.sample` has the
other half and says how both work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant

PART = 4096
"""Tokens of one program; the most that are collected."""
BANDS: tl.constexpr = tl.constexpr(32)
"""Band j counts weights in [2 ** -j, 2 ** (1 - j)), the last one all that are smaller."""
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)
_COLDEST: tl.constexpr = tl.constexpr(1e-30)
WARPS = 8


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
def row_cuts(settings, vocab):
    """(whether the row's settings let it draw, whether it is cut, top_k or 0, top_p)."""
    top_k = tl.load(settings + 1).to(tl.int32)
    top_k = tl.where(top_k < vocab, top_k, 0)
    top_p = tl.load(settings + 2)
    draws = (tl.load(settings) != 0.0) & (tl.load(settings + 1) != 1.0)
    return draws, (top_k > 0) | (top_p < 1.0), top_k, top_p


@triton.jit
def weights_of(x, peak, settings):
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
        draws, cut, _, _ = row_cuts(settings, vocab)
        if healthy & draws:
            x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
            w = weights_of(x, peak, settings)
            tl.store(sums + at, tl.sum(w.to(tl.float64), 0))
            if cut:
                tl.store(weights + row * weights_stride + i, w)
                band = tl.minimum(127 - (w.to(tl.int32, bitcast=True) >> 23), BANDS - 1)
                tl.store(bands + at * BANDS + tl.arange(0, BANDS), tl.histogram(band, BANDS))


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


def weigh(logits: Tensor, settings: Tensor | None, scratch: Scratch) -> tuple[int, dict[str, Any]]:
    """Fill the scratch but for ids; (parts of a row, constexprs of the kernels that read it).

    sums are those of rows that draw. Without settings they are those of exp(logit - best), for all rows that have a
    best and no NaN or +inf; weights and bands stay as they are then.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    sizes = {"PART": PART, "PARTS": triton.next_power_of_2(parts)}
    grid, stride = (rows, parts), logits.stride(0)
    found = (scratch.peaks, scratch.peak_ids, scratch.faults)
    peak_kernel[grid](logits, *found, stride, vocab, PART, num_warps=WARPS)
    weigh_kernel[grid](
        logits,
        settings,
        *found,
        scratch.weights,
        scratch.sums,
        scratch.bands,
        stride,
        0 if settings is None else settings.stride(0),
        scratch.weights.stride(0),
        vocab,
        **sizes,
        PLAIN=settings is None,
        num_warps=WARPS,
    )
    return parts, sizes


ARGUMENTS = {
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
"""Types of what the kernels of sampling take."""


def variants_of(kernels: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> list[Variant]:
    """Each kernel with its own constexprs, for vocabularies of 32,000 and of 151,936 tokens (8 and 64 parts)."""
    found = []
    for parts in (8, 64):
        for name, (kernel, more) in kernels.items():
            constexprs = {"PART": PART, "PARTS": parts} | dict(more)
            constexprs = {key: value for key, value in constexprs.items() if key in kernel.arg_names}
            signature = {key: ARGUMENTS[key] for key in kernel.arg_names if key not in constexprs}
            found.append(Variant(f"sample/{name}/{parts}", kernel, signature, constexprs, WARPS))
    return found


def variants() -> list[Variant]:
    return variants_of(
        {
            "peak": (peak_kernel, {}),
            "weigh": (weigh_kernel, {"PLAIN": False}),
            "weigh/plain": (weigh_kernel, {"PLAIN": True, "settings": None}),
        }
    )
