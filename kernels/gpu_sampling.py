"""From logits to tokens and log-probabilities on the device, in plain torch, with the meaning of `kernels/sampler.py`
and `kernels/logprobs.py`. Nothing here waits for the device; every row's result depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.shapes import LOGPROB_FLOOR

_COLDEST = 1e-30


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """What is done to logits [rows, vocab] before a token is chosen: bans, then biases, then penalties.

    Lists of all rows, one behind the other; row i has those from begins[i] to begins[i + 1]. int64, amounts float32.
    """

    ban_begins: Tensor  # [rows + 1]
    banned: Tensor
    bias_begins: Tensor  # [rows + 1]
    biased: Tensor  # no id twice in a row
    amounts: Tensor
    history_begins: Tensor  # [rows + 1]; a row without history has no penalties
    histories: Tensor  # prompt and output
    prompt_lens: Tensor  # [rows]: tokens at the beginning of a history that count for repetition alone


def edit(logits: Tensor, settings: Tensor, edits: DeviceEdits) -> None:
    """Change float32 logits [rows, vocab] in place, penalties by columns 5 to 7 of settings float64 [rows, 8]; see
    `kernels.reference.edit_logits`.
    """
    ban_rows, bias_rows = _rows_of(edits.ban_begins, edits.banned), _rows_of(edits.bias_begins, edits.biased)
    logits.index_put_((ban_rows, edits.banned), logits.new_full((), float("-inf")))
    logits.index_put_((bias_rows, edits.biased), edits.amounts, accumulate=True)
    if not len(edits.histories):
        return
    rows = _rows_of(edits.history_begins, edits.histories)
    seen, counts = torch.zeros_like(logits), torch.zeros_like(logits)
    place = torch.arange(len(rows), device=logits.device) - edits.history_begins[rows]
    outputs = (place >= edits.prompt_lens[rows]).float()
    seen.index_put_((rows, edits.histories), torch.ones_like(outputs), accumulate=True)
    counts.index_put_((rows, edits.histories), outputs, accumulate=True)
    repetition, presence, frequency = settings[:, 5:8, None].float().unbind(1)
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = changed - frequency * counts - presence * (counts > 0)
    logits.copy_(torch.where(seen > 0, changed, logits))


def _rows_of(begins: Tensor, values: Tensor) -> Tensor:
    """The row of each value; int64."""
    return torch.repeat_interleave(begins.diff(), output_size=len(values))


def greedy(logits: Tensor, out: Tensor) -> None:
    """out int64 [rows]: the largest finite logit, ties to the lowest id; token 0 where there is none."""
    # argmax names the first of equals; an infinity or NaN counts as nothing.
    torch.argmax(torch.where(logits.isfinite(), logits, float("-inf")), dim=-1, out=out)


def sample(logits: Tensor, settings: Tensor, out: Tensor, edits: DeviceEdits | None = None) -> None:
    """out int64 [rows]: a token for each row of float32 logits [rows, vocab], in which edits are left, by its settings
    float64 [rows, 8], whose first five are temperature (0: greedy), top_k, top_p, min_p and a draw in [0, 1).

    A row with NaN or +inf is greedy over its finite logits.
    """
    if edits is not None:
        edit(logits, settings, edits)
    greedy(logits, out)
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p, draw = settings[:, :5, None].unbind(1)
    peak = logits.gather(1, out[:, None])
    inverse = (1.0 / temperature.clamp(min=_COLDEST)).float()
    weights = torch.exp((logits - peak) * inverse)
    weights = torch.where(weights >= min_p.float(), weights, 0.0)
    best_first, order = weights.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(vocab, device=logits.device)
    best_first = torch.where((place < top_k) | (top_k <= 0), best_first, 0.0)
    sums = best_first.double().cumsum(-1)
    before = sums - best_first.double()
    best_first = torch.where((before < top_p * sums[:, -1:]) | (top_p >= 1.0), best_first, 0.0)
    weights = torch.zeros_like(weights).scatter_(1, order, best_first)
    running = weights.double().cumsum(-1)
    drawn = (running <= draw * running[:, -1:]).sum(-1)
    # Rounding may leave no sum above the target: then the last token that has a weight.
    last = torch.where(weights > 0, place, 0).amax(-1)
    drawn = torch.minimum(drawn, last)
    unclean = logits.isnan().any(-1) | logits.isposinf().any(-1) | ~logits.isfinite().any(-1)
    out.copy_(torch.where((settings[:, 0] == 0.0) | (settings[:, 1] == 1.0) | unclean, out, drawn))


def logprobs(logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(values float32 [rows, 1 + width], ids int64 [rows, width]) of float32 logits [rows, vocab]: the chosen token's
    natural logarithm, then those of the `width` likeliest, ties by lowest id.

    -inf is told as LOGPROB_FLOOR, and so is everything in a row with NaN or +inf.
    """
    values = logits.double().log_softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    told = torch.cat((values.gather(1, chosen[:, None]), values.gather(1, ids)), dim=1)
    return torch.nan_to_num(told, nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR).float(), ids
