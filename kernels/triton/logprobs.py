"""Log-probabilities on a device: the meaning of `kernels.logprobs`, from the sums that sampling uses.

The likeliest tokens are picked by torch on integers: a logit's bits in the order of the numbers, over its id, so that
equals come by lowest id whatever the selection does. A row's values depend on that row alone, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.shapes import LOGPROB_FLOOR
from kernels.triton.compiled import Variant
from kernels.triton.weigh import Scratch, row_peak, weigh

FLOOR: tl.constexpr = tl.constexpr(LOGPROB_FLOOR)


@triton.jit(do_not_specialize=["width"])
def told_kernel(
    logits, peaks, peak_ids, faults, sums, ids, values, stride, parts, width, PARTS: tl.constexpr, PAD: tl.constexpr
):
    """Program (row): values [rows, width] = log-probability of each of ids [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    peak, _, healthy = row_peak(peaks, peak_ids, faults, row, parts, PARTS)
    p, i = tl.arange(0, PARTS), tl.arange(0, PAD)
    total = tl.sum(tl.load(sums + row * parts + p, mask=p < parts, other=0.0), 0)
    wanted = tl.load(ids + row * width + i, mask=i < width, other=0)
    x = tl.load(logits + row * stride + wanted, mask=i < width, other=0.0).to(tl.float64)
    value = x - tl.where(healthy, peak, 0.0).to(tl.float64) - tl.log(tl.where(healthy, total, 1.0))
    # Also where value is NaN.
    told = tl.where(healthy & (value > FLOOR), value, FLOOR)
    tl.store(values + row * width + i, told.to(tl.float32), mask=i < width)


def logprobs(logits: Tensor, chosen: Tensor, num_top: int, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """(values float32 [rows, 1 + num_top], ids int64 [rows, num_top]) of logits float32 [rows, vocab], any row stride:
    natural logarithms of the chosen token and of the num_top likeliest, which ids names, ties by lowest id.

    chosen: int64 [rows]; num_top: at most vocab. -inf is told as LOGPROB_FLOOR, and so is everything in a row with NaN
    or +inf. The logits are left as they are. No host synchronisation.
    """
    rows, vocab = logits.shape
    # Bits of floats below 0 order backwards. Adding 0 makes -0 the same as 0.
    bits = torch.where(logits.isnan(), -torch.inf, logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order << 32) + torch.arange(vocab, 0, -1, device=logits.device)
    top_ids = vocab - (keys.topk(num_top, dim=1).values & 0xFFFFFFFF)
    ids = torch.cat((chosen[:, None], top_ids), 1)
    values = torch.empty(rows, 1 + num_top, dtype=torch.float32, device=logits.device)
    if rows:
        scratch = scratch or Scratch.make(rows, vocab, logits.device)
        parts, sizes = weigh(logits, None, scratch)
        found = (scratch.peaks, scratch.peak_ids, scratch.faults, scratch.sums)
        pad = triton.next_power_of_2(1 + num_top)
        numbers = (logits.stride(0), parts, 1 + num_top)
        told_kernel[(rows,)](logits, *found, ids, values, *numbers, sizes["PARTS"], pad, num_warps=1)
    return values, top_ids


def variants() -> list[Variant]:
    signature = {"logits": "*fp32:16", "peaks": "*fp32:16", "peak_ids": "*i32:16", "faults": "*i32:16"}
    signature |= {"sums": "*fp64:16", "ids": "*i64:16", "values": "*fp32:16", "stride": "i32:16"}
    signature |= {"parts": "i32", "width": "i32"}
    return [Variant("logprobs/told/64", told_kernel, signature, {"PARTS": 64, "PAD": 32}, 1)]
