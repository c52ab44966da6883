"""The kernels' meaning in plain torch: slow, short, and what every other implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [rows, K], weight: [N, K] -> [rows, N]."""
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., width] -> the same shape (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: [rows, 2 width] -> [rows, width]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, dim], cos and sin: [tokens, dim / 2] -> rotated x, halves convention."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def write_kv(pool: Tensor, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Put k, v [tokens, kv_heads, dim] at `slots` (block * size + slot) of pool [block, head, layer, 2, slot, dim]."""
    size = pool.shape[4]
    pool[slots // size, :, layer, 0, slots % size] = k
    pool[slots // size, :, layer, 1, slots % size] = v


def attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    start_pos: Sequence[int],
    num_tokens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    window: int = 0,
) -> Tensor:
    """Causal attention of flattened rows q [tokens, heads, dim] over the pool -> [tokens, heads, dim].

    window > 0: a query sees the `window` latest positions, itself included. Scores are scaled by dim ** -0.5.
    """
    out = torch.empty_like(q)
    size = pool.shape[4]
    done = 0
    for start, count, table in zip(start_pos, num_tokens, block_tables, strict=True):
        end = start + count
        blocks = pool[list(table[: -(-end // size)]), :, layer]  # [blocks, kv_heads, 2, slot, dim]
        kv = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :end]  # [2, kv_heads, keys, dim]
        group = q.shape[1] // kv.shape[1]
        k, v = kv.repeat_interleave(group, dim=1)
        rows = q[done : done + count].transpose(0, 1)  # [heads, rows, dim]
        scores = rows @ k.transpose(1, 2) * q.shape[2] ** -0.5
        behind = torch.arange(start, end)[:, None] - torch.arange(end)[None, :]
        hidden = behind < 0
        if window > 0:
            hidden |= behind >= window
        scores.masked_fill_(hidden, float("-inf"))
        out[done : done + count] = (scores.softmax(-1) @ v).transpose(0, 1)
        done += count
    return out


def edit_logits(
    logits: Tensor,
    history: Sequence[int] = (),
    prompt_len: int = 0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Sequence[tuple[int, float]] = (),
) -> Tensor:
    """float32 [vocab]: logits float32 [vocab] after biases and penalties, every operation rounded to float32.

    history: prompt and output; its first `prompt_len` tokens count for repetition only. In vLLM's order: bias (its
    `LogitBiasLogitsProcessor`), repetition (Keskar et al. 2019, section 4.1), frequency, presence (`apply_penalties`).
    """
    x = logits.clone()
    for token, amount in bias:
        x[token] += torch.tensor(amount, dtype=torch.float32)
    ids = torch.tensor(list(history), dtype=torch.int64)
    seen = torch.bincount(ids, minlength=len(x)) > 0
    counts = torch.bincount(ids[prompt_len:], minlength=len(x)).float()
    factor = torch.tensor(repetition, dtype=torch.float32)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    x = x - torch.tensor(frequency, dtype=torch.float32) * counts
    return x - torch.tensor(presence, dtype=torch.float32) * (counts > 0)


def sample_weights(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """float64 [vocab]: what each token of float32 logits [vocab] weighs, 0 where min-p, top-k or top-p cut it.

    The best token weighs 1, so min-p is the least weight that stays (Nguyen et al. 2024). Top-p is a share of what
    min-p and top-k left; equals stay by lowest id (Holtzman et al. 2020).
    """
    weights = torch.exp((logits.double() - logits.max().double()) / temperature)
    weights[weights < min_p] = 0
    order = torch.argsort(weights, descending=True, stable=True)
    if 0 < top_k < len(weights):
        weights[order[top_k:]] = 0
    if top_p < 1.0:
        below = weights[order].cumsum(0) < top_p * weights.sum()
        weights[order[int(below.sum()) + 1 :]] = 0
    return weights


def logprobs(logits: Tensor, chosen: int, num_top: int) -> tuple[float, list[int], list[float]]:
    """(log-probability of `chosen`, ids of the num_top likeliest tokens, theirs) of float32 logits [vocab]; ties by
    lowest id.
    """
    values = torch.log_softmax(logits.double(), 0)
    order = torch.argsort(logits, descending=True, stable=True)[:num_top]
    return float(values[chosen]), order.tolist(), values[order].tolist()
