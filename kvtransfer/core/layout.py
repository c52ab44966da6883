"""Where KV lies in memory: `[block, kv_head, layer, k|v, slot, dim]`, row-major.

A block - and any head range of it - is one contiguous run, whatever the number of layers; kernels see contiguous
[slot, dim] tiles. Does not touch memory: numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes of each block that a pull moves: these many from `remote_offset` of the peer's block to `local_offset`
    of the own one. Offsets in bytes.
    """

    remote_offset: int
    local_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one worker's (or rank's) KV pool. `num_kv_heads` are KV heads, never attention heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block (slots)."""
    dtype_bytes: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers: layers x 2 (k, v) x kv_heads x head_dim x bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[kv_head, layer, k|v, slot, dim] of one block."""
        return (self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """[block, kv_head, layer, k|v, slot, dim] of a pool."""
        return (num_blocks, *self.block_shape)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` tokens (of one sequence or a sum over sequences), without block rounding."""
        return self.token_bytes * num_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of a block: one contiguous run."""
        return self.block_bytes // self.num_kv_heads

    def describe(self) -> str:
        """Canonical text for the identity: the slot layout, without the parallel degree."""
        return (
            f"block,head,layer,kv,slot,dim;layers={self.num_layers};kv_heads={self.num_kv_heads};"
            f"dim={self.head_dim};slots={self.block_size};bytes={self.dtype_bytes}"
        )
