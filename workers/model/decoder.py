"""The decoder: token ids of a whole step's rows, flattened, to logits of the rows that sample.

All activations are [tokens, width] over all requests; only attention knows which tokens belong together. Every
operation gives each row a result that depends on that row alone, so the logits of a request are the same bits in any
company.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kernels.ops import PoolShape, Program, StepRows, Then, padded_stride
from kernels.weights import Storage, huge_bytes
from workers.model.config import ModelConfig
from workers.model.layers import LayerWeights, load_layer
from workers.model.loaders import Weights
from workers.model.matrices import load_packed
from workers.model.rope import rope_tables
from workers.model.weight_format import WeightFormat


class Workspace:
    """Activation buffers for up to `tokens` rows. Contents are valid within one step."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self.tokens = tokens
        widths = self._widths(config)
        strides = [padded_stride(width) for width in widths]
        memory = huge_bytes(4 * tokens * sum(strides)).view(torch.float32)
        parts = memory.split([tokens * stride for stride in strides])
        views = [p.view(tokens, s)[:, :w] for p, s, w in zip(parts, strides, widths, strict=True)]
        self.residual, self.last_residual, self.normed, self.qkv, self.mixed, self.last_mixed, self.act = views

    @staticmethod
    def _widths(config: ModelConfig) -> list[int]:
        c = config
        heads = c.heads * c.head_dim
        return [c.hidden, c.hidden, c.hidden, heads + 2 * c.kv_heads * c.head_dim, heads, heads, c.intermediate]

    @classmethod
    def bytes_for(cls, config: ModelConfig, tokens: int) -> int:
        return 4 * tokens * sum(map(padded_stride, cls._widths(config)))


class Decoder:
    """Weights and forward pass of one model on CPU over one KV pool, float32 arithmetic."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        pool: Tensor,
        shape: PoolShape,
        *,
        weight_format: WeightFormat,
        max_positions: int,
        max_tokens: int,
        max_sampled: int,
        threads: int,
    ) -> None:
        """Reads and packs all weights. Raises StartupError when the folder does not hold what config says.

        max_tokens, max_sampled: rows and sampled rows of one step; more make the buffers grow.
        """
        self.config = config
        self._pool, self._shape = pool, shape
        self._threads = threads
        weights = Weights(folder)
        size = config.vocab_size, config.hidden
        self._embedding = load_packed(weights, weight_format, [("model.embed_tokens.weight", size)])
        self._head = self._embedding
        if not config.tied_embeddings:
            self._head = load_packed(weights, weight_format, [("lm_head.weight", size)])
        self._layers: list[LayerWeights] = [load_layer(config, weights, weight_format, i) for i in range(config.layers)]
        self._final_norm = weights.get("model.norm.weight", config.hidden).clone()
        self._cos, self._sin = rope_tables(config.rope, config.head_dim, max_positions)
        self._record(max_tokens, max_sampled)

    def memory_plan(self) -> dict[str, int]:
        """Bytes of packed weights and of workspace."""
        return {
            "weights": sum(self.storage_bytes().values()),
            "workspace": Workspace.bytes_for(self.config, self._space.tokens)
            + 4 * self._logits.numel()
            + 8 * self._cos.numel(),
        }

    def storage_bytes(self) -> dict[Storage, int]:
        """Bytes of packed weights by the way they are kept, the largest first."""
        matrices = [self._embedding, *([] if self._head is self._embedding else [self._head])]
        total: Counter[Storage] = Counter()
        for weight in chain(matrices, *(layer.matrices for layer in self._layers)):
            total[weight.storage] += weight.num_bytes
        return dict(total.most_common())

    def forward(self, rows: StepRows) -> Tensor:
        """Logits [sampled rows, vocab], valid until the next step. Writes KV of all tokens to the pool.

        Raises ValueError for a token id or a position that the model does not have.
        """
        sampled = len(rows.sampled)
        if rows.tokens > self._space.tokens or sampled > len(self._logits):
            self._record(max(rows.tokens, self._space.tokens), max(sampled, len(self._logits)))
        # Without a row that samples nobody wants more than the KV of the last layer.
        self._program.run(rows, None if sampled else self._kv_written)
        return self._logits[:sampled]

    def _record(self, tokens: int, sampled: int) -> None:
        """Take buffers for steps of this size and record the step over them."""
        c, s = self.config, Workspace(self.config, tokens)
        pool, shape = self._pool, self._shape
        program = Program(self._threads)
        program.embed(self._embedding, s.residual)
        x, mixed, last = s.residual, s.mixed, False
        for i, layer in enumerate(self._layers):
            program.rms_norm(x, layer.input_norm, c.norm_eps, s.normed)
            program.linear(s.normed, layer.qkv, s.qkv)
            program.rope_write(s.qkv, c.heads, shape, pool, i, self._cos, self._sin, layer.qk_norm)
            self._kv_written = len(program)
            program.attention(s.qkv, c.heads, shape, pool, i, mixed, c.windows[i])
            if i == c.layers - 1:
                # Past attention only rows that sample are of use to anybody.
                last = True
                program.pick(x, s.last_residual)
                program.pick(mixed, s.last_mixed)
                x, mixed = s.last_residual, s.last_mixed
            program.linear(mixed, layer.output, x, Then.ADD, sampled=last)
            program.rms_norm(x, layer.middle_norm, c.norm_eps, s.normed, sampled=last)
            program.linear(s.normed, layer.gate_up, s.act, Then.SWIGLU, sampled=last)
            program.linear(s.act, layer.down, x, Then.ADD, sampled=last)
        program.rms_norm(x, self._final_norm, c.norm_eps, s.normed, sampled=True)
        self._logits = huge_bytes(4 * sampled * c.vocab_size).view(torch.float32).view(sampled, c.vocab_size)
        program.linear(s.normed, self._head, self._logits, sampled=True)
        self._space, self._program = s, program
