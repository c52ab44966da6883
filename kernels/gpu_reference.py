"""What the GPU kernels mean, in plain torch on any device: the same signatures as the modules under `kernels/triton`,
float32 arithmetic whatever the tensors' dtype. For tests, and where Triton cannot run.

The pool is `[block, kv_head, layer, k|v, slot, dim]`; rows are those of `kernels.gpu_rows.DeviceRows`. Only
`prefill_attention` and `rope_write` wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference

QkNorm = tuple[Tensor, Tensor, float]
"""Weights [dim] of Q's and K's norm, and their eps."""


def linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [rows, N] = x [rows, K] @ weight [N, K].T + bias [N]."""
    if out.dtype != x.dtype:
        if x.is_cuda and bias is None:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)  # sums are not rounded on their way
        else:
            out.copy_(torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight, row by row. x, out: [rows, width]."""
    out.copy_(reference.rms_norm(x.float(), weight.float(), eps))


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta, then out = norm of residual. All [rows, width]."""
    residual.copy_(residual.float() + delta.float())
    rms_norm(residual, weight, eps, out)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out [rows, width] = silu(gate) * up of gate_up [rows, 2 width], gate first."""
    out.copy_(reference.swiglu(gate_up.float()))


def rope_write(
    qkv: Tensor,
    heads: int,
    pool: Tensor,
    layer: int,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_norm: QkNorm | None = None,
) -> None:
    """Norm (if given) and rotate Q and K of qkv [tokens, (heads + 2 kv_heads) * dim] in place; write K and V to the
    pool at `slots` (-1: nowhere). cos, sin: float32 [positions, dim / 2]."""
    kv_heads, dim = pool.shape[1], pool.shape[5]
    q, k, v = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    at = positions.long()
    for number, part in enumerate((q, k)):
        x = part.float()
        if qk_norm is not None:
            x = reference.rms_norm(x, qk_norm[number].float(), qk_norm[2])
        part.copy_(reference.rope(x, cos[at], sin[at]))
    kept = slots >= 0
    reference.write_kv(pool, layer, slots[kept], k[kept], v[kept])


def decode_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    window: int = 0,
    splits: int = 0,
    scratch: object = None,
) -> None:
    """out [rows, heads, dim]: attention of one query a row, at position length - 1; zeros where the length is 0.

    window > 0: a query sees the `window` latest positions, itself included. splits, scratch: nothing here.
    """
    rows, heads, dim = q.shape
    kv_heads, size = pool.shape[1], pool.shape[4]
    kv = pool[tables.long(), :, layer]  # [rows, width, kv_heads, 2, slot, dim]
    kv = kv.permute(3, 0, 2, 1, 4, 5).reshape(2, rows, kv_heads, -1, dim).float()  # [2, rows, kv_heads, keys, dim]
    at = torch.arange(tables.shape[1] * size, device=q.device)
    seen = at < lengths[:, None]
    if window > 0:
        seen = seen & (at >= lengths[:, None] - window)
    seen = seen[:, None, :, None]
    # What a block holds behind a row's end is anything, NaN included: no product may read it.
    keys, values = (torch.where(seen, part, 0.0) for part in kv)
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim).float()
    scores = (grouped @ keys.transpose(2, 3)) * dim**-0.5
    scores = scores.masked_fill(~seen.transpose(2, 3), float("-inf"))
    weights = torch.where(lengths[:, None, None, None] > 0, scores.softmax(-1), 0.0)
    out.copy_((weights @ values).reshape(rows, heads, dim))


def prefill_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    start_pos: Tensor,
    out: Tensor,
    *,
    max_tokens: int,
    window: int = 0,
    invariant: bool = False,
) -> None:
    """Causal attention of the tokens starts[i] .. starts[i + 1] of q, out [tokens, heads, dim], row by row over what
    the pool holds from position 0 on. max_tokens: of the longest row. invariant: nothing here.
    """
    begins, firsts = starts.tolist(), start_pos.tolist()
    for row, first in enumerate(firsts):
        begin, end = begins[row], begins[row + 1]
        if begin < end:
            table = tables[row, : -(-(first + end - begin) // pool.shape[4])].long()
            out[begin:end] = _row_attention(q[begin:end], pool[table, :, layer], first, window)


def _row_attention(q: Tensor, blocks: Tensor, start: int, window: int) -> Tensor:
    """q: [tokens, heads, dim], blocks: [blocks, kv_heads, 2, slot, dim] -> [tokens, heads, dim]."""
    count, heads, dim = q.shape
    end = start + count
    kv = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :end].float()  # [2, kv_heads, keys, dim]
    k, v = kv.repeat_interleave(heads // kv.shape[1], dim=1)
    scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * dim**-0.5  # [heads, tokens, keys]
    behind = torch.arange(start, end, device=q.device)[:, None] - torch.arange(end, device=q.device)
    hidden = (behind < 0) | (behind >= window) if window > 0 else behind < 0
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1).to(q.dtype)


def embed(table: Tensor, token_ids: Tensor, out: Tensor) -> None:
    """out [tokens, width] = rows token_ids of table [vocab, width]."""
    torch.index_select(table, 0, token_ids, out=out)
