"""Bans, biases and penalties in logits on a device, in the order and with the roundings of `kernels.cpu_sample`.

One program a row: its phases are parted by barriers, so the row's result is one of fixed operations, whichever thread
does them. Costs grow with the row's own lists: each id of a history is a store and two atomics of one program.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant

TILE = 1024


@dataclass(frozen=True, slots=True)
class Edits:
    """What changes the logits of `rows` rows, as flat lists on the device: entries begins[i] to begins[i + 1] are row
    i's. All begins and ids are int32 or int64.

    A row's biased ids must be distinct. A row without history has no penalties; prompt_lens [rows]: how many ids at the
    beginning of its history are the prompt's.
    """

    ban_begins: Tensor
    banned: Tensor
    bias_begins: Tensor
    biased: Tensor
    amounts: Tensor
    """float32, added to the logits of `biased`."""
    history_begins: Tensor
    histories: Tensor
    prompt_lens: Tensor


_LISTS = ("ban_begins", "banned", "bias_begins", "biased", "amounts", "history_begins", "histories", "prompt_lens")


# Lists may be parts of one transfer, at any offset: no launch shall wait for a compiler because of it.
@triton.jit(do_not_specialize_on_alignment=_LISTS)
def edit_kernel(
    logits,
    settings,
    ban_begins,
    banned,
    bias_begins,
    biased,
    amounts,
    history_begins,
    histories,
    prompt_lens,
    marks,
    logits_stride,
    settings_stride,
    marks_stride,
    TILE: tl.constexpr,
):
    """marks: int32 [rows, vocab] with any content: of a row's history, bit 0 says that a token is in the prompt, the
    higher bits count it in the output.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    logits += row * logits_stride
    begin, end = tl.load(ban_begins + row), tl.load(ban_begins + row + 1)
    for start in range(begin, end, TILE):
        inside = start + lane < end
        ids = tl.load(banned + start + lane, mask=inside, other=0)
        tl.store(logits + ids, tl.full([TILE], float("-inf"), tl.float32), mask=inside)
    tl.debug_barrier()

    begin, end = tl.load(bias_begins + row), tl.load(bias_begins + row + 1)
    for start in range(begin, end, TILE):
        inside = start + lane < end
        ids = tl.load(biased + start + lane, mask=inside, other=0)
        x = tl.load(logits + ids, mask=inside, other=0.0)
        tl.store(logits + ids, x + tl.load(amounts + start + lane, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()

    begin, end = tl.load(history_begins + row), tl.load(history_begins + row + 1)
    if begin >= end:
        return
    marks += row * marks_stride
    output = begin + tl.load(prompt_lens + row)
    for start in range(begin, end, TILE):
        inside = start + lane < end
        ids = tl.load(histories + start + lane, mask=inside, other=0)
        tl.store(marks + ids, tl.zeros([TILE], tl.int32), mask=inside)
    tl.debug_barrier()
    for start in range(begin, end, TILE):
        at = start + lane
        ids = tl.load(histories + at, mask=at < end, other=0)
        tl.atomic_or(marks + ids, 1, mask=at < output)
        tl.atomic_add(marks + ids, 2, mask=(at >= output) & (at < end))
    tl.debug_barrier()
    settings += row * settings_stride
    repetition = tl.load(settings + 5).to(tl.float32)
    presence = tl.load(settings + 6).to(tl.float32)
    frequency = tl.load(settings + 7).to(tl.float32)
    for start in range(begin, end, TILE):
        inside = start + lane < end
        ids = tl.load(histories + start + lane, mask=inside, other=0)
        # Of a token's places in the history one takes the mark, and changes the logit.
        mark = tl.atomic_xchg(marks + ids, 0, mask=inside)
        taken = inside & (mark != 0)
        x = tl.load(logits + ids, mask=taken, other=0.0)
        x = tl.where(x > 0.0, tl.div_rn(x, tl.full([TILE], 0.0, tl.float32) + repetition), x * repetition)
        x = tl.where(mark > 1, x - frequency * (mark >> 1).to(tl.float32) - presence, x)
        tl.store(logits + ids, x, mask=taken)


def edit_logits(logits: Tensor, settings: Tensor, edits: Edits, marks: Tensor) -> None:
    """Change logits float32 [rows, vocab] in place: bans, then biases, then penalties by columns 5 to 7 of settings
    (`kernels.triton.sample`), every operation rounded to float32.

    marks: int32 [rows, at least vocab] of scratch with any content. No host synchronisation.
    """
    if logits.shape[0] == 0:
        return
    edit_kernel[(logits.shape[0],)](
        logits,
        settings,
        edits.ban_begins,
        edits.banned,
        edits.bias_begins,
        edits.biased,
        edits.amounts,
        edits.history_begins,
        edits.histories,
        edits.prompt_lens,
        marks,
        logits.stride(0),
        settings.stride(0),
        marks.stride(0),
        TILE,
        num_warps=8,
        # A product and its subtraction are two roundings, as in the reference.
        enable_fp_fusion=False,
    )


def variants() -> list[Variant]:
    signature = {"logits": "*fp32:16", "settings": "*fp64:16", "marks": "*i32:16"}
    signature |= dict.fromkeys(_LISTS, "*i32") | {"amounts": "*fp32"}
    signature |= {"logits_stride": "i32:16", "settings_stride": "i32", "marks_stride": "i32:16"}
    return [Variant("edit_logits", edit_kernel, signature, {"TILE": TILE}, 8)]
