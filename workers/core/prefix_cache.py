"""Which full block holds the KV of which chain of tokens: hash -> block, plain LRU (the pool keeps the order).

A hash may enter only after the step (or the read) that wrote the block is over, so that nobody hits KV which is not
there yet; the first block with a hash stays its block, later copies remain private to their requests.

Does not: hash tokens, hold references (the caller does, through the pool), or decide who may share (the chain's root
does).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import InvariantError
from workers.core.blocks import BlockPool


class PrefixCache:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is present. Takes no references: valid until `alloc`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Make a used block's finished content findable. False when another block already has that content."""
        if block_hash in self._block_of:
            return False
        self._pool.label(block, block_hash)
        self._block_of[block_hash] = block
        return True

    def check_integrity(self) -> None:
        """Raises InvariantError unless entries and labelled blocks are the same set."""
        labelled = {
            block_hash: block
            for block in range(self._pool.num_blocks)
            if (block_hash := self._pool.hash_of(block)) is not None
        }
        if labelled != self._block_of:
            raise InvariantError("the prefix cache points to a block that does not hold that content")

    def _forget(self, block_hash: bytes) -> None:
        del self._block_of[block_hash]
