"""The pool of KV blocks: who may use which, and nothing about what is in them.

A block is in exactly one state:

    FREE         on the free list
    USED         reference count > 0; may carry a label (then the prefix cache points to it as well)
    CACHED       reference count 0, carries a label; taken when the free list is empty, by `workers.core.eviction`
    QUARANTINED  the target of a read that was given up and may still write;
                 named by its holder until the read is terminal
    RETIRED      out of use: its memory is the system's until it is restored

               alloc                   decref to 0, no label
    FREE <---------------> USED -------------------------------> FREE
                           ^  |  decref to 0, has a label
                    incref |  +--------------------------------> CACHED --(evict)--> USED by alloc
                           +------------------------------------ CACHED --(unlabel)--> FREE
    USED (one reference, no label) --quarantine--> QUARANTINED --release--> FREE
    FREE, or CACHED and evicted for it --retire--> RETIRED --restore--> FREE

A label is the hash of a full block's content, or b"" for a block that is filled in part. Every operation is O(1) a
block, those on idle labelled ones O(log blocks). Does not: hash, match, or know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from heapq import nlargest

from headrace.errors import InvariantError
from workers.core.eviction import IdleBlocks


class BlockState(StrEnum):
    FREE = "free"
    USED = "used"
    CACHED = "cached"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class BlockPool:
    """Blocks 0 .. num_blocks-1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0
        self.allocated = 0
        """Blocks given out since the start."""
        self.on_evict: Callable[[int], None] = lambda _: None
        """Told of a labelled block that is about to be reused; set by the prefix cache."""
        self.idle = IdleBlocks(num_blocks)
        """The cached blocks. The prefix cache gives labelled blocks their place there."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._num_used = 0
        self._labels: list[bytes | None] = [None] * num_blocks
        self._quarantined: dict[str, list[int]] = {}
        self._num_quarantined = 0
        self._retired: list[int] = []

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def evictable_blocks(self) -> int:
        return len(self.idle)

    @property
    def available_blocks(self) -> int:
        """What `alloc` can give at most."""
        return len(self._free) + len(self.idle)

    @property
    def quarantined_blocks(self) -> int:
        return self._num_quarantined

    @property
    def retired_blocks(self) -> int:
        return len(self._retired)

    @property
    def usable_blocks(self) -> int:
        """All but the retired ones."""
        return self.num_blocks - len(self._retired)

    @property
    def used_blocks(self) -> int:
        """Blocks with references (quarantined ones are counted apart)."""
        return self._num_used

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def label_of(self, block: int) -> bytes | None:
        return self._labels[block]

    def alloc(self, n: int) -> list[int] | None:
        """n blocks with one reference each, or None and no change. Evicts cached blocks at need."""
        if n > self.available_blocks:
            return None
        kept = max(0, len(self._free) - n)
        blocks = self._free[: kept - 1 if kept else None : -1]
        del self._free[kept:]
        while len(blocks) < n:
            # What an eviction takes with it is free.
            blocks.append(self._free.pop() if self._free else self._evict())
        for block in blocks:
            self._refs[block] = 1
        self._num_used += n
        self.allocated += n
        return blocks

    def evict_ahead(self, num_free: int) -> None:
        """Have so many free blocks, if evictions can give them: `alloc` is then quick."""
        while len(self._free) < num_free and self.idle:
            self._free.append(self._evict())

    def incref(self, blocks: Iterable[int]) -> None:
        """One more reference to each used or cached block."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self.idle:
                    raise InvariantError(f"block {block}: a reference to a block that is neither used nor cached")
                self.idle.remove(block)
                self._num_used += 1
            self._refs[block] += 1

    def decref(self, blocks: Iterable[int]) -> None:
        """One reference less to each, in order. Give a chain's last block first: then its tail is evicted first."""
        for block in blocks:
            refs = self._refs[block] - 1
            if refs < 0:
                raise InvariantError(f"block {block}: more releases than references")
            self._refs[block] = refs
            if refs == 0:
                self._num_used -= 1
                if self._labels[block] is None:
                    self._free.append(block)
                else:
                    self.idle.add(block)

    def label(self, block: int, label: bytes) -> None:
        """Name a used block's content; the block outlives its last reference from now on, until it is evicted."""
        if self._refs[block] == 0 or self._labels[block] is not None:
            raise InvariantError(f"block {block}: only a used block without a label takes one")
        self._labels[block] = label

    def unlabel(self, block: int) -> None:
        """Its content is not to be kept: an idle block is free now, a used one when its last reference goes."""
        if self._labels[block] is None:
            raise InvariantError(f"block {block}: it has no label to lose")
        self._labels[block] = None
        if self._refs[block] == 0:
            self.idle.remove(block)
            self._free.append(block)

    def quarantine(self, blocks: Sequence[int], holder: str) -> None:
        """Put aside blocks that somebody may still write to. Each must be used, unshared and without a label."""
        for block in blocks:
            if self._refs[block] != 1 or self._labels[block] is not None:
                raise InvariantError(f"block {block}: a read's target was shared or cached before the read was over")
            self._refs[block] = 0
            self._num_used -= 1
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

    def retire(self, num_blocks: int) -> list[int]:
        """Take so many blocks that nobody uses out of use, or all such; cached ones only where free ones are too few.

        Those with the highest numbers go, so that what goes lies together. O(blocks). What is in them is lost.
        """
        self.evict_ahead(num_blocks)
        blocks = nlargest(num_blocks, self._free)
        gone = frozenset(blocks)
        self._free = [block for block in self._free if block not in gone]
        self._retired += blocks
        return blocks

    def next_restored(self, num_blocks: int) -> list[int]:
        """What `restore` takes."""
        return self._retired[max(0, len(self._retired) - num_blocks) :]

    def restore(self, num_blocks: int) -> list[int]:
        """Take so many retired blocks into use again, or all; they are the last to be given. O(blocks)."""
        blocks = self.next_restored(num_blocks)
        del self._retired[len(self._retired) - len(blocks) :]
        self._free[:0] = blocks
        return blocks

    def state(self, block: int) -> BlockState:
        """For audits and tests; O(blocks)."""
        if self._refs[block] > 0:
            return BlockState.USED
        if block in self.idle:
            return BlockState.CACHED
        if block in self._retired:
            return BlockState.RETIRED
        return BlockState.FREE if block in self._free else BlockState.QUARANTINED

    def check_integrity(self) -> None:
        """Raises InvariantError unless every block is in exactly one state. O(blocks)."""
        used = [block for block, refs in enumerate(self._refs) if refs > 0]
        aside = [block for blocks in self._quarantined.values() for block in blocks]
        if sorted([*self._free, *self.idle, *used, *aside, *self._retired]) != list(range(self.num_blocks)):
            raise InvariantError("blocks are lost or in two states")
        if (self._num_used, self._num_quarantined) != (len(used), len(aside)):
            raise InvariantError("the count of used or of quarantined blocks is wrong")
        if any(self._labels[block] is None for block in self.idle):
            raise InvariantError("a cached block has no label")
        if any(self._labels[block] is not None for block in [*self._free, *aside, *self._retired]):
            raise InvariantError("a free, quarantined or retired block has a label")

    def _evict(self) -> int:
        block = self.idle.pop()
        self.evictions += 1
        self.on_evict(block)
        self._labels[block] = None
        return block
