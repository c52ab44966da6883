"""The checked face of the GPU kernels: each operation runs as a Triton kernel where that can be, else in plain torch
(`kernels.gpu_reference`, `kernels.gpu_sampling`), and says once in the log which and why.

Arithmetic is float32 over tensors of one dtype (bfloat16, float16 or float32). Wrong shapes raise ValueError before
anything is written. Nothing here waits for the device unless `capturable` is False.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels import gpu_reference, gpu_sampling
from kernels.gpu_reference import QkNorm
from kernels.gpu_rows import DeviceRows
from kernels.gpu_sampling import DeviceEdits
from kernels.shapes import SETTINGS

log = logging.getLogger("headrace.kernels.gpu_ops")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCH_INVARIANT_SPLITS = 8
"""Parts that a row's context is cut into, in every batch."""
_TRITON_MODULES = {
    "decode_attention": "attention_decode",
    "prefill_attention": "attention_prefill",
    "rms_norm": "rows",
    "add_rms_norm": "rows",
    "swiglu": "rows",
    "rope_write": "rows",
    "sample": "sample",
    "logprobs": "logprobs",
}
_PLAIN = {"sample": gpu_sampling, "logprobs": gpu_sampling}
_MAY_WAIT = ("prefill_attention", "rope_write")
"""Whose torch forms wait for the device."""


def triton_fault(device: torch.device) -> str:
    """Why Triton kernels cannot run over tensors of `device`; empty: they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return "the tensors are on a CPU and TRITON_INTERPRET is not set"
    try:
        importlib.import_module("triton")
    except ImportError:
        return "triton is not installed"
    return ""


class DeviceOps:
    """The operations of one engine on one device, enqueued on one stream. `use_triton` False takes plain torch."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False, use_triton: bool = True) -> None:
        """Raises ValueError when batch_invariant is wanted and its kernels cannot run."""
        self.device = device
        self._fault = triton_fault(device) if use_triton else "plain torch was asked for"
        self._invariant = batch_invariant
        self._why: dict[str, str] = {}
        self._run = {
            operation: self._choose(operation, module, getattr(_PLAIN.get(operation, gpu_reference), operation))
            for operation, module in _TRITON_MODULES.items()
        }
        self._why["linear"] = "torch's matrix product is the faster one"
        self._linear_rows = 0
        if batch_invariant:
            self._choose("linear", "matmul", gpu_reference.linear)
            missing = [name for name in ("linear", "decode_attention", "prefill_attention") if self._why[name]]
            if missing:
                raise ValueError(f"batch_invariant needs Triton kernels: {self._why[missing[0]]}")
        self._why["embed"] = "torch has it"
        self._scratch: dict[str, Any] = {}
        self._outgrown: list[Any] = []
        for operation, why in self._why.items():
            log.info("kernel_chosen operation=%s uses=%s reason=%s", operation, self._name(why), why or "it can run")

    def _choose(self, operation: str, module: str, otherwise: Callable[..., None]) -> Callable[..., None]:
        why, chosen = self._fault, otherwise
        if not why:
            try:
                chosen = getattr(importlib.import_module(f"kernels.triton.{module}"), operation)
            except ImportError as error:
                why = f"kernels.triton.{module} cannot be imported ({error})"
        self._why[operation] = why
        return chosen

    @staticmethod
    def _name(why: str) -> str:
        return "torch" if why else "triton"

    def chosen(self) -> dict[str, str]:
        """Operation -> implementation that runs it."""
        return {operation: self._name(why) for operation, why in self._why.items()}

    @property
    def capturable(self) -> bool:
        """Whether a step of decode rows can be recorded as a CUDA graph."""
        return not any(self._why[operation] for operation in _MAY_WAIT)

    def embed(self, table: Tensor, token_ids: Tensor, out: Tensor) -> None:
        """out [tokens, hidden] = rows of table [vocab, hidden]; ids int64 [tokens]."""
        _check(out, (len(token_ids), table.shape[1]), "out")
        gpu_reference.embed(table, token_ids, out)

    def linear(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """out [rows, N] = x [rows, K] @ weight [N, K].T + bias [N]."""
        _check(x, (None, weight.shape[1]), "x")
        _check(out, (len(x), weight.shape[0]), "out")
        if not self._invariant:
            gpu_reference.linear(x, weight, out, bias)
            return
        from kernels.triton import matmul

        if (made := self._scratch.get("linear")) is None or self._linear_rows < len(x):
            self._linear_rows, made = len(x), matmul.Scratch.make(x.device, len(x))
            self._keep("linear", made)
        matmul.linear(x, weight, out, bias, made)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out = x / rms(x) * weight, row by row; [rows, width]."""
        _check(x, (None, len(weight)), "x")
        _check(out, tuple(x.shape), "out")
        self._run["rms_norm"](x, weight, eps, out)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, out = norm of residual; [rows, width]."""
        _check(residual, (None, len(weight)), "residual")
        _check(delta, tuple(residual.shape), "delta")
        _check(out, tuple(residual.shape), "out")
        self._run["add_rms_norm"](residual, delta, weight, eps, out)

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """out [rows, width] = silu(gate) * up of gate_up [rows, 2 width]."""
        _check(gate_up, (len(out), 2 * out.shape[1]), "gate_up")
        self._run["swiglu"](gate_up, out)

    def rope_write(
        self,
        qkv: Tensor,
        heads: int,
        pool: Tensor,
        layer: int,
        rows: DeviceRows,
        cos: Tensor,
        sin: Tensor,
        qk_norm: QkNorm | None = None,
    ) -> None:
        """Norm (if given) and rotate Q and K of qkv [tokens, (heads + 2 kv_heads) * dim] in place; write K and V."""
        kv_heads, dim = _heads(pool, layer)
        _check(qkv, (rows.num_tokens, (heads + 2 * kv_heads) * dim), "qkv")
        self._run["rope_write"](qkv, heads, pool, layer, rows.positions, rows.slots, cos, sin, qk_norm)

    def attention(
        self, qkv: Tensor, heads: int, pool: Tensor, layer: int, rows: DeviceRows, out: Tensor, window: int = 0
    ) -> None:
        """out [tokens, heads * dim]: causal paged attention of a step whose decode rows come first.

        The first heads * dim columns of qkv are the rotated queries; the pool has the keys and values of all tokens.
        window > 0: a query sees the `window` latest positions, itself included.
        """
        kv_heads, dim = _heads(pool, layer)
        tokens, first = rows.num_tokens, rows.num_decode
        _check(qkv, (tokens, (heads + 2 * kv_heads) * dim), "qkv")
        _check(out, (tokens, heads * dim), "out")
        q = qkv[:, : heads * dim].unflatten(1, (heads, dim))
        mixed = out.unflatten(1, (heads, dim))
        if first:
            tables, lengths = rows.tables[:first], rows.lengths[:first]
            splits, scratch = self._decode_launch(q[:first], pool, tables)
            self._run["decode_attention"](
                q[:first], pool, layer, tables, lengths, mixed[:first], window=window, splits=splits, scratch=scratch
            )
        if first < rows.num_rows:
            tables, starts, start_pos = rows.tables[first:], rows.starts[first:], rows.start_pos[first:]
            self._run["prefill_attention"](
                q,
                pool,
                layer,
                tables,
                starts,
                start_pos,
                mixed,
                max_tokens=rows.max_tokens,
                window=window,
                invariant=self._invariant,
            )

    def _decode_launch(self, q: Tensor, pool: Tensor, tables: Tensor) -> tuple[int, Any]:
        """(splits, scratch) of a decode attention: memory that is made once lets graphs share it."""
        splits = BATCH_INVARIANT_SPLITS if self._invariant else 0
        if self._why["decode_attention"]:
            return splits, None
        from kernels.triton import attention_decode, tuned

        rows, heads, dim = q.shape
        kinds = tuned.Heads(tuned.dtype_name(q.dtype), dim, heads // pool.shape[1], pool.shape[4])
        capacity = tables.shape[1] * pool.shape[4]
        launch = tuned.decode_launch(tuned.device_of(q.device), kinds, rows, pool.shape[1], capacity, splits)
        made = self._scratch.get("decode")
        if made is None or made.parts.numel() < rows * heads * launch.splits * dim or len(made.arrived) < rows * heads:
            made = attention_decode.Scratch.make(rows, heads, dim, launch.splits, q.device)
            self._keep("decode", made)
        return splits, made

    def _keep(self, name: str, scratch: Any) -> None:
        """In the place of a smaller one, which graphs may still use."""
        self._outgrown.append(self._scratch.get(name))
        self._scratch[name] = scratch

    def resolve(self, token_ids: Tensor, fed: Tensor, out: Tensor) -> None:
        """out int64 [tokens] = token_ids, where -1 - k stands for fed[k]."""
        torch.where(token_ids < 0, fed[(-1 - token_ids).clamp(min=0)], token_ids, out=out)

    def sample(self, logits: Tensor, settings: Tensor, out: Tensor, edits: DeviceEdits | None = None) -> None:
        """out int64 [rows]: a token for each row of float32 logits [rows, vocab], in which edits are left, by settings
        float64 [rows, 8] as `kernels.sampler.SampleTable` has them.

        Ties go to the lowest id. A row with NaN or +inf is greedy over its finite logits; one without any gives 0.
        """
        rows, vocab = logits.shape
        _check(settings, (rows, SETTINGS), "settings")
        _check(out, (rows,), "out")
        if self._why["sample"]:
            gpu_sampling.sample(logits, settings, out, edits)
            return
        from kernels.triton import sample

        made = self._scratch.get("sample")
        if made is None or made.weights.shape[0] < rows:
            made = sample.Scratch.make(rows, vocab, logits.device)
            self._keep("sample", made)
        sample.sample(logits, settings, out, edits, made)

    def logprobs(self, logits: Tensor, chosen: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """See `gpu_sampling.logprobs`."""
        told: tuple[Tensor, Tensor] = self._run["logprobs"](logits, chosen, width)
        return told


def _check(x: Tensor, shape: tuple[Any, ...], name: str) -> None:
    if x.dim() != len(shape) or any(w is not None and w != g for w, g in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(x.shape)}")
    if x.shape and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must have whole rows")


def _heads(pool: Tensor, layer: int) -> tuple[int, int]:
    """(kv_heads, dim) of a pool that has this layer."""
    if pool.dim() != 6 or pool.shape[3] != 2:
        raise ValueError(f"a pool is [block, kv_head, layer, 2, slot, dim], not {list(pool.shape)}")
    if not 0 <= layer < pool.shape[2]:
        raise ValueError(f"layer {layer} does not exist")
    return pool.shape[1], pool.shape[5]
