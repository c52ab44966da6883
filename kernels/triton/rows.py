"""Row-wise kernels: RMSNorm with and without a residual, SwiGLU, and QK-norm with RoPE and the KV write.

All of them are bound by memory. A thread takes 16 bytes at a time, every byte is read and written once, and small
batches are cut into many programs. Arithmetic is float32, rounded where a tensor is stored; a row depends on that row
alone. Shapes are those of the caller: `kernels.gpu_ops` checks them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.compiled import Variant

SWIGLU_TILE = 1024
_ROPE_TILE = 1024
"""Elements of a half of the heads that one program rotates."""


@triton.jit
def norm_kernel(
    x,
    delta,
    weight,
    out,
    eps,
    x_stride,
    delta_stride,
    out_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program a row, which stays in registers between its sum of squares and its scaling."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < WIDTH
    x += row * x_stride
    v = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(delta + row * delta_stride + i, mask=inside, other=0.0).to(tl.float32)
        stored = v.to(x.dtype.element_ty)
        tl.store(x + i, stored, mask=inside)
        # What the next layer reads is normed, so that the two operations together are the same as one after the other.
        v = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, (v * inverse * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, in_stride, out_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < WIDTH
    gate_up += row * in_stride
    gate = tl.load(gate_up + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + i, y.to(out.dtype.element_ty), mask=inside)


# The tokens' own numbers may be part of a step's at any offset: no launch shall wait for a compiler because of it.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_write_kernel(
    qkv,
    positions,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    pool,
    eps,
    qkv_stride,
    block_stride,
    head_stride,
    layer_offset,
    value_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    PAD_HALF: tl.constexpr,
):
    """Program (token, GROUP heads of its Q, K and V in this order). A head is two halves [PAD_HALF], kept apart."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    i = tl.arange(0, PAD_HALF)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (i < HALF)[None, :]
    at = qkv + token * qkv_stride + head[:, None] * DIM + i[None, :]
    raw_a = tl.load(at, mask=inside, other=0.0)
    raw_b = tl.load(at + HALF, mask=inside, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
        is_q = (head < HEADS)[:, None]
        w = tl.where(is_q, q_weight + i[None, :], k_weight + i[None, :])
        a = a * inverse[:, None] * tl.load(w, mask=inside, other=0.0).to(tl.float32)
        b = b * inverse[:, None] * tl.load(w + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + token).to(tl.int64) * HALF + i
    c = tl.load(cos + angle, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=i < HALF, other=0.0)[None, :]
    turned_a = (a * c - b * s).to(raw_a.dtype)
    turned_b = (b * c + a * s).to(raw_a.dtype)
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    turned = inside & (head < HEADS + KV_HEADS)[:, None]
    tl.store(at, turned_a, mask=turned)
    tl.store(at + HALF, turned_b, mask=turned)

    kept = inside & (head >= HEADS)[:, None]
    kv_head = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS).to(tl.int64)
    spot = pool + slot // BLOCK * block_stride + layer_offset + slot % BLOCK * DIM
    spot += (kv_head * head_stride)[:, None] + tl.where(is_v, value_offset, 0) + i[None, :]
    tl.store(spot, tl.where(is_v, raw_a, turned_a).to(pool.dtype.element_ty), mask=kept)
    tl.store(spot + HALF, tl.where(is_v, raw_b, turned_b).to(pool.dtype.element_ty), mask=kept)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / rms(x) * weight, row by row. x, out: [rows, width], any row stride; out may be x; weight: [width]."""
    _norm(x, x, weight, eps, out, add=False)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta in place, then out = rms_norm(residual) as stored. All [rows, width]; out may be delta."""
    _norm(residual, delta, weight, eps, out, add=True)


def _norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor, add: bool) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    constexprs = norm_constexprs(width, add)
    strides = (x.stride(0), delta.stride(0), out.stride(0))
    norm_kernel[(rows,)](x, delta, weight, out, eps, *strides, **constexprs, num_warps=_warps(constexprs["PAD"]))


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """out [rows, width] = silu(gate) * up of gate_up [rows, 2 width], gate first; any row strides."""
    rows, width = out.shape
    if rows == 0:
        return
    grid = (rows, triton.cdiv(width, SWIGLU_TILE))
    swiglu_kernel[grid](gate_up, out, gate_up.stride(0), out.stride(0), width, SWIGLU_TILE, num_warps=4)


def rope_write(
    qkv: Tensor,
    heads: int,
    pool: Tensor,
    layer: int,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """Norm (if given) and rotate Q and K of qkv in place, halves convention; write K and V to the pool.

    qkv: [tokens, (heads + 2 kv_heads) * dim], any row stride; pool: [block, kv_head, layer, 2, slot, dim], dense within
    [slot, dim]; positions: integers [tokens]; slots: int64 [tokens] of block * block_size + slot, -1: the token is
    padding, nothing of it is read or written; cos, sin: float32 [positions, dim / 2], dense; qk_norm: weights [dim] of
    Q and of K, and epsilon. Two tokens must not have one slot.
    """
    tokens = qkv.shape[0]
    _, kv_heads, _, _, block, dim = pool.shape
    if tokens == 0:
        return
    q_weight, k_weight, eps = qk_norm or (cos, cos, 0.0)
    constexprs = rope_constexprs(heads, kv_heads, dim, block, qk_norm is not None)
    rope_write_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, constexprs["GROUP"]))](
        qkv,
        positions,
        slots,
        cos,
        sin,
        q_weight,
        k_weight,
        pool,
        eps,
        qkv.stride(0),
        pool.stride(0),
        pool.stride(1),
        layer * pool.stride(2),
        pool.stride(3),
        **constexprs,
        num_warps=4,
    )


def norm_constexprs(width: int, add: bool) -> dict[str, Any]:
    return {"WIDTH": width, "PAD": triton.next_power_of_2(width), "ADD": add}


def rope_constexprs(heads: int, kv_heads: int, dim: int, block: int, norm: bool) -> dict[str, Any]:
    half = triton.next_power_of_2(dim // 2)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK": block}
    return shape | {"NORM": norm, "GROUP": max(1, _ROPE_TILE // half), "PAD_HALF": half}


def _warps(padded_width: int) -> int:
    """Eight elements of a thread: one load of 16 bytes where they are halves."""
    return min(16, max(1, padded_width // 256))


def variants() -> list[Variant]:
    """Widths and heads of the models in docs/gpu.md."""
    found = []
    for width, add, kind in _kinds((896, 2048, 4096, 5120, 8192), (False, True)):
        constexprs = norm_constexprs(width, add)
        signature = dict.fromkeys(("x", "delta", "weight", "out"), f"*{kind}:16") | {"eps": "fp32"}
        signature |= dict.fromkeys(("x_stride", "delta_stride", "out_stride"), "i32:16")
        name = f"{'add_' if add else ''}rms_norm/{kind}/{width}"
        found.append(Variant(name, norm_kernel, signature, constexprs, _warps(constexprs["PAD"])))
    for width, kind in _kinds((4864, 8192, 14336)):
        signature = {"gate_up": f"*{kind}:16", "out": f"*{kind}:16", "in_stride": "i32:16", "out_stride": "i32:16"}
        constexprs = {"WIDTH": width, "TILE": SWIGLU_TILE}
        found.append(Variant(f"swiglu/{kind}/{width}", swiglu_kernel, signature, constexprs))
    heads_of_dims = ((8, 4, 256), (14, 2, 64), (32, 32, 96), (32, 8, 128))
    for (heads, kv_heads, dim), norm, kind in _kinds(heads_of_dims, (False, True)):
        signature = {"qkv": f"*{kind}:16", "positions": "*i32", "slots": "*i64", "cos": "*fp32:16"}
        weight = f"*{kind}:16" if norm else "*fp32:16"
        signature |= {"sin": "*fp32:16", "q_weight": weight, "k_weight": weight, "pool": f"*{kind}:16", "eps": "fp32"}
        strides = ("qkv_stride", "block_stride", "head_stride", "layer_offset", "value_offset")
        signature |= dict.fromkeys(strides, "i32:16")
        name = f"rope_write/{kind}/{heads}x{kv_heads}x{dim}{'/norm' if norm else ''}"
        found.append(Variant(name, rope_write_kernel, signature, rope_constexprs(heads, kv_heads, dim, 16, norm)))
    return found


def _kinds(*choices: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """All combinations in bfloat16, and the first one in float32."""
    every = list(product(*choices))
    return [(*one, "bf16") for one in every] + [(*every[0], "fp32")]
