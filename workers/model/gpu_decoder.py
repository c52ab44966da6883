"""The decoder on a device: token ids of a whole step's rows, flattened, to logits of the rows that sample.

Everything is enqueued and nothing is waited for; over rows of fixed sizes the same calls can be recorded as a graph.
Activations are [tokens, width] in the weights' dtype over all requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu_ops import DeviceOps
from kernels.gpu_rows import DeviceRows
from workers.model.config import ModelConfig
from workers.model.gpu_weights import DeviceLayer, DeviceWeights


class DeviceWorkspace:
    """Activation buffers for up to `tokens` rows and `sampled` rows of logits. Contents are valid within one step.

    `wide` is QKV and later gate and up; `narrow` is what attention gives and later the activation.
    """

    def __init__(
        self, config: ModelConfig, tokens: int, sampled: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        c = config
        heads = c.heads * c.head_dim
        self.qkv_width = heads + 2 * c.kv_heads * c.head_dim
        wide, narrow = max(self.qkv_width, 2 * c.intermediate), max(heads, c.intermediate)

        def rows(width: int) -> Tensor:
            return torch.empty(tokens * width, dtype=dtype, device=device)

        self.token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.residual, self.normed, self.delta = rows(c.hidden), rows(c.hidden), rows(c.hidden)
        self.wide, self.narrow = rows(wide), rows(narrow)
        self.logits = torch.zeros(sampled, c.vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(sampled, dtype=torch.int64, device=device)
        """What the last step sampled: the next one reads it."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


def _view(buffer: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] at the beginning of a buffer, without gaps."""
    return buffer[: rows * width].view(rows, width)


class DeviceDecoder:
    """Forward pass of one model over one KV pool [block, kv_head, layer, 2, slot, dim]."""

    def __init__(
        self, config: ModelConfig, weights: DeviceWeights, pool: Tensor, ops: DeviceOps, space: DeviceWorkspace
    ) -> None:
        self.config, self.space = config, space
        self._weights, self._pool, self._ops = weights, pool, ops

    def forward(self, rows: DeviceRows, all_sampled: bool = False) -> Tensor:
        """Float32 logits [sampled rows, vocab], valid until the next step. Writes KV of all tokens to the pool.

        all_sampled: the rows' `sampled` is every token in order.
        """
        c, s, w, ops = self.config, self.space, self._weights, self._ops
        tokens, sampled = rows.num_tokens, len(rows.sampled)
        ids = s.token_ids[:tokens]
        ops.resolve(rows.token_ids, s.tokens, ids)
        residual, normed, delta = (_view(part, tokens, c.hidden) for part in (s.residual, s.normed, s.delta))
        ops.embed(w.embedding, ids, residual)
        ops.rms_norm(residual, w.layers[0].input_norm, c.norm_eps, normed)
        for index, layer in enumerate(w.layers):
            last = index == c.layers - 1
            mixed = self._mix(normed, layer, index, rows, kv_only=last and not sampled)
            if last and not sampled:
                break  # nobody wants more than the KV of the last layer
            if last and not all_sampled:
                # Past attention only rows that sample are of use to anybody.
                residual, mixed = residual[rows.sampled], mixed[rows.sampled]
                normed, delta = normed[:sampled], delta[:sampled]
            ops.linear(mixed, layer.output.weight, delta, layer.output.bias)
            ops.add_rms_norm(residual, delta, layer.middle_norm, c.norm_eps, normed)
            self._feed_forward(normed, layer, delta)
            following = w.final_norm if last else w.layers[index + 1].input_norm
            ops.add_rms_norm(residual, delta, following, c.norm_eps, normed)
        logits = s.logits[:sampled]
        if sampled:
            ops.linear(normed, w.head, logits)
        return logits

    def _mix(self, normed: Tensor, layer: DeviceLayer, index: int, rows: DeviceRows, kv_only: bool) -> Tensor:
        """Write K and V; attention's result [tokens, heads * dim], undefined with kv_only."""
        c, s, w, ops = self.config, self.space, self._weights, self._ops
        tokens = rows.num_tokens
        qkv = _view(s.wide, tokens, s.qkv_width)
        ops.linear(normed, layer.qkv.weight, qkv, layer.qkv.bias)
        ops.rope_write(qkv, c.heads, self._pool, index, rows, w.cos, w.sin, layer.qk_norm)
        mixed = _view(s.narrow, tokens, c.heads * c.head_dim)
        if not kv_only:
            ops.attention(qkv, c.heads, self._pool, index, rows, mixed, c.windows[index])
        return mixed

    def _feed_forward(self, normed: Tensor, layer: DeviceLayer, out: Tensor) -> None:
        c, s, ops = self.config, self.space, self._ops
        gate_up, act = _view(s.wide, len(normed), 2 * c.intermediate), _view(s.narrow, len(normed), c.intermediate)
        ops.linear(normed, layer.gate_up.weight, gate_up, layer.gate_up.bias)
        ops.swiglu(gate_up, act)
        ops.linear(act, layer.down.weight, out, layer.down.bias)
