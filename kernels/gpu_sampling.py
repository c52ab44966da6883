"""From logits to tokens and log-probabilities on the device, in plain torch, with the meaning of `kernels/sampler.py`
and `kernels/logprobs.py`. Nothing here waits for the device; every row's result depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_COLDEST = 1e-30
LOGPROB_FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class DeviceEdits:
    """What is done to logits before a token is chosen: bans, then biases, then penalties. Lists of all rows in one.

    `history_*` are the tokens so far of `penalized` rows, each named by its place among those rows.
    """

    ban_rows: Tensor  # int64 [bans]
    ban_ids: Tensor  # int64 [bans]
    bias_rows: Tensor  # int64 [biases]
    bias_ids: Tensor  # int64 [biases], no pair of row and id twice
    bias_amounts: Tensor  # float32 [biases]
    penalized: Tensor  # int64 [penalized]: row of logits
    penalties: Tensor  # float32 [penalized, 3]: repetition, presence, frequency
    history_rows: Tensor  # int64 [history]
    history_ids: Tensor  # int64 [history]
    history_outputs: Tensor  # float32 [history]: 1 where a token is output, 0 where it is prompt


def edit(logits: Tensor, edits: DeviceEdits) -> None:
    """Change float32 logits [rows, vocab] in place; see `kernels.reference.edit_logits`."""
    if len(edits.ban_rows):
        logits.index_put_((edits.ban_rows, edits.ban_ids), logits.new_full((), float("-inf")))
    if len(edits.bias_rows):
        logits.index_put_((edits.bias_rows, edits.bias_ids), edits.bias_amounts, accumulate=True)
    if len(edits.penalized):
        logits[edits.penalized] = _penalize(logits[edits.penalized], edits)


def _penalize(x: Tensor, edits: DeviceEdits) -> Tensor:
    """x: [penalized, vocab]."""
    seen, counts = torch.zeros_like(x), torch.zeros_like(x)
    at = edits.history_rows, edits.history_ids
    seen.index_put_(at, torch.ones_like(edits.history_outputs), accumulate=True)
    counts.index_put_(at, edits.history_outputs, accumulate=True)
    repetition, presence, frequency = edits.penalties.t()[:, :, None]
    x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


def greedy(logits: Tensor, out: Tensor) -> None:
    """out int64 [rows]: the largest finite logit, ties to the lowest id; token 0 where there is none."""
    # argmax names the first of equals; an infinity or NaN counts as nothing.
    torch.argmax(torch.where(logits.isfinite(), logits, float("-inf")), dim=-1, out=out)


def sample(logits: Tensor, settings: Tensor, out: Tensor) -> None:
    """out int64 [rows]: a token for each row of float32 logits [rows, vocab] by its settings float64 [rows, 8], whose
    first five are temperature (0: greedy), top_k, top_p, min_p and a draw in [0, 1).

    A row with NaN or +inf is greedy over its finite logits.
    """
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
