"""The decoder: token ids of a whole step's rows, flattened, to logits of the rows that sample.

All activations are [tokens, width] over all requests; only attention knows which tokens belong together. Every
operation gives each row a result that depends on that row alone, so the logits of a request are the same bits in any
company.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.ops import CpuOps, PackedWeight, PoolShape, StepRows
from workers.model.config import ModelConfig
from workers.model.layers import LayerWeights, load_layer
from workers.model.loaders import Weights
from workers.model.rope import rope_tables


class Workspace:
    """Activation buffers for up to `tokens` rows. Contents are valid within one step."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        c = config
        self.tokens = tokens
        self.residual = torch.empty(tokens, c.hidden)
        self.normed = torch.empty(tokens, c.hidden)
        self.delta = torch.empty(tokens, c.hidden)
        self.qkv = torch.empty(tokens, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.mixed = torch.empty(tokens, c.heads * c.head_dim)
        self.gate_up = torch.empty(tokens, 2 * c.intermediate)
        self.act = torch.empty(tokens, c.intermediate)

    @staticmethod
    def bytes_for(config: ModelConfig, tokens: int) -> int:
        c = config
        width = 3 * c.hidden + (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.intermediate
        return 4 * width * tokens


class Decoder:
    """Weights and forward pass of one model on CPU, float32."""

    def __init__(self, config: ModelConfig, folder: Path, ops: CpuOps, max_positions: int, max_tokens: int) -> None:
        """Reads and packs all weights. Raises StartupError when the folder does not hold what config says."""
        self.config = config
        self._ops = ops
        weights = Weights(folder)
        self._embedding = weights.get("model.embed_tokens.weight", config.vocab_size, config.hidden)
        self._layers: list[LayerWeights] = [load_layer(config, weights, i, ops) for i in range(config.layers)]
        self._final_norm = weights.get("model.norm.weight", config.hidden).clone()
        head = self._embedding
        if not config.tied_embeddings:
            head = weights.get("lm_head.weight", config.vocab_size, config.hidden)
        self._head: PackedWeight = ops.pack([head])
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_positions)
        self._space = Workspace(config, max_tokens)

    def memory_plan(self) -> dict[str, int]:
        """Bytes of weights (packed, and the embedding's mapped file pages) and of workspace."""
        embedding = self._embedding.numel() * 4
        return {
            "weights": embedding + self._head.num_bytes + sum(layer.num_bytes for layer in self._layers),
            "workspace": Workspace.bytes_for(self.config, self._space.tokens) + 8 * self._cos.numel(),
        }

    def forward(
        self, token_ids: Tensor, pool: Tensor, shape: PoolShape, rows: StepRows, sampled: Sequence[int]
    ) -> Tensor:
        """Logits [len(sampled), vocab] of the flat token indices in `sampled`. Writes KV of all tokens to the pool.

        token_ids: int64 [tokens], all below vocab_size.
        """
        c, ops = self.config, self._ops
        count = token_ids.shape[0]
        if count > self._space.tokens:
            self._space = Workspace(c, count)
        s = self._space
        x, normed, delta = s.residual[:count], s.normed[:count], s.delta[:count]
        qkv, mixed, gate_up, act = s.qkv[:count], s.mixed[:count], s.gate_up[:count], s.act[:count]
        torch.index_select(self._embedding, 0, token_ids, out=x)
        added: Tensor | None = None
        for i, layer in enumerate(self._layers):
            ops.rms_norm(x, layer.input_norm, c.norm_eps, normed, added)
            ops.linear(normed, layer.qkv, qkv)
            ops.rope_write(qkv, c.heads, shape, pool, i, rows, self._cos, self._sin, layer.qk_norm)
            last_layer = i == c.layers - 1
            if last_layer and not sampled:
                break  # KV is written, and nobody wants more
            ops.attention(qkv, c.heads, shape, pool, i, rows, mixed, c.windows[i])
            if last_layer:
                # Past attention only rows that sample are of use to anybody.
                wanted = torch.tensor(sampled)
                x, mixed = x[wanted], mixed[wanted]
                last = len(sampled)
                normed, delta, gate_up, act = normed[:last], delta[:last], gate_up[:last], act[:last]
            ops.linear(mixed, layer.output, delta)
            ops.rms_norm(x, layer.middle_norm, c.norm_eps, normed, delta)
            ops.linear(normed, layer.gate_up, gate_up)
            ops.swiglu(gate_up, act)
            ops.linear(act, layer.down, delta)
            added = delta
        if not sampled:
            return torch.empty(0, c.vocab_size)
        ops.rms_norm(x, self._final_norm, c.norm_eps, normed, added)
        return ops.linear(normed, self._head, torch.empty(len(sampled), c.vocab_size))
