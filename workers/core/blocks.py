"""The pool of KV blocks: who may use which, and nothing about what is in them.

A block is in exactly one state:

    FREE         on the free list
    USED         reference count > 0; may carry a hash (then the prefix cache points to it as well)
    CACHED       reference count 0, carries a hash; in LRU order, taken when the free list is empty
    QUARANTINED  the target of a read that was given up and may still write;
                 named by its holder until the read is terminal

               alloc                   decref to 0, no hash
    FREE <---------------> USED -------------------------------> FREE
                           ^  |  decref to 0, has a hash
                    incref |  +--------------------------------> CACHED --(evict)--> USED by alloc
                           +------------------------------------ CACHED
    USED (one reference, no hash) --quarantine--> QUARANTINED --release--> FREE

Every operation is O(1) a block. Does not: hash, match, or know requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from headrace.errors import InvariantError


class BlockState(StrEnum):
    FREE = "free"
    USED = "used"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class BlockPool:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.on_evict: Callable[[bytes], None] = lambda _: None
        """Told the hash of a block that is about to be reused; set by the prefix cache."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: dict[str, list[int]] = {}
        self._num_quarantined = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def evictable_blocks(self) -> int:
        return len(self._cached)

    @property
    def available_blocks(self) -> int:
        """What `alloc` can give at most."""
        return len(self._free) + len(self._cached)

    @property
    def quarantined_blocks(self) -> int:
        return self._num_quarantined

    @property
    def used_blocks(self) -> int:
        """Blocks with references (quarantined ones are counted apart)."""
        return self.num_blocks - self.available_blocks - self._num_quarantined

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def alloc(self, n: int) -> list[int] | None:
        """n blocks with one reference each, or None and no change. Evicts least recently used blocks at need."""
        if n > self.available_blocks:
            return None
        kept = max(0, len(self._free) - n)
        blocks = self._free[: kept - 1 if kept else None : -1]
        del self._free[kept:]
        blocks += [self._evict() for _ in range(n - len(blocks))]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def incref(self, blocks: Iterable[int]) -> None:
        """One more reference to each used or cached block."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise InvariantError(f"block {block}: a reference to a block that is neither used nor cached")
                del self._cached[block]
            self._refs[block] += 1

    def decref(self, blocks: Iterable[int]) -> None:
        """One reference less to each, in order. Give a chain's last block first: then its tail is evicted first."""
        for block in blocks:
            refs = self._refs[block] - 1
            if refs < 0:
                raise InvariantError(f"block {block}: more releases than references")
            self._refs[block] = refs
            if refs == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def label(self, block: int, block_hash: bytes) -> None:
        """Name a used block's content; the block outlives its last reference from now on, until it is evicted."""
        if self._refs[block] == 0 or self._hashes[block] is not None:
            raise InvariantError(f"block {block}: only a used block without a hash takes one")
        self._hashes[block] = block_hash

    def quarantine(self, blocks: Sequence[int], holder: str) -> None:
        """Put aside blocks that somebody may still write to. Each must be used, unshared and without a hash."""
        for block in blocks:
            if self._refs[block] != 1 or self._hashes[block] is not None:
                raise InvariantError(f"block {block}: a read's target was shared or cached before the read was over")
            self._refs[block] = 0
        if blocks:
            self._quarantined.setdefault(holder, []).extend(blocks)
            self._num_quarantined += len(blocks)

    def release_quarantine(self, holder: str) -> int:
        """No byte can land any more: the holder's blocks are free. Returns how many; 0 when there were none."""
        blocks = self._quarantined.pop(holder, [])
        self._num_quarantined -= len(blocks)
        self._free.extend(blocks)
        return len(blocks)

    def quarantine_holders(self) -> dict[str, int]:
        return {holder: len(blocks) for holder, blocks in self._quarantined.items()}

    def state(self, block: int) -> BlockState:
        """For audits and tests; O(blocks)."""
        if self._refs[block] > 0:
            return BlockState.USED
        if block in self._cached:
            return BlockState.CACHED
        return BlockState.FREE if block in self._free else BlockState.QUARANTINED

    def check_integrity(self) -> None:
        """Raises InvariantError unless every block is in exactly one state. O(blocks)."""
        used = [block for block, refs in enumerate(self._refs) if refs > 0]
        aside = [block for blocks in self._quarantined.values() for block in blocks]
        if sorted([*self._free, *self._cached, *used, *aside]) != list(range(self.num_blocks)):
            raise InvariantError("blocks are lost or in two states")
        if self._num_quarantined != len(aside):
            raise InvariantError("the count of quarantined blocks is wrong")
        if any(self._hashes[block] is None for block in self._cached):
            raise InvariantError("a cached block has no hash")
        if any(self._hashes[block] is not None for block in [*self._free, *aside]):
            raise InvariantError("a free or quarantined block has a hash")

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        if block_hash is None:
            raise InvariantError(f"block {block}: cached without a hash")
        self._hashes[block] = None
        self.evictions += 1
        self.on_evict(block_hash)
        return block
