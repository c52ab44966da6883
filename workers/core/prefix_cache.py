"""Which block holds the KV of which chain of tokens: full blocks by their hashes, and of others those tokens with which
a prompt goes on.

    match          the longest leading run of full blocks
    match_partial  behind it: the block below the same predecessor that has the longest run of leading tokens in common,
                   full or filled in part. Its reader copies it: positions that are written once never change, whatever
                   follows them

A hash may enter only after the step (or the read) that wrote the block is over, so that nobody hits KV which is not
there yet; the first block with a hash stays its block, later copies remain private to their requests. A block enters
only below its predecessor, and leaves with all that is below it: what is here can be hit.

Does not: hash tokens, hold references (the caller does, through the pool), or decide who may share (the chain's root
does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from headrace.core.records import cache_key
from headrace.errors import InvariantError
from workers.core.blocks import BlockPool
from workers.core.cache_log import CacheLog

_COMPARED = 8
"""Blocks whose tokens are compared with a prompt's, the latest first."""
_PARTIAL = b""
"""The pool's label for a block that is not full: it has no name."""


@dataclass(slots=True)
class Entry:
    """A cached block. `parent`: hash of its predecessor, or the chain's root; `index`: its place in the chain."""

    hash: bytes
    parent: bytes
    index: int
    tokens: Sequence[int]
    tenant: str


class Below(Protocol):
    """The next tier: it may keep what is evicted here. Both are called in the midst of an allocation: neither may ask
    for blocks."""

    def offer(self, block: int, block_hash: bytes, parent: bytes, value_ms: float) -> None:
        """A full block is about to be reused. Its bytes stay until something outside the scheduler writes to the pool,
        or the rows of the step that is planned next do. value_ms: prefill time that a hit saves."""

    def peek(self, block_hash: bytes) -> bool:
        """The tier has the block now."""


class PrefixCache:
    def __init__(self, pool: BlockPool, log: CacheLog | None = None) -> None:
        self.log = CacheLog() if log is None else log
        self.below: Below | None = None
        self.saved_ms: Callable[[int], float] = lambda index: 1.0
        """Prefill time that the block at this place of a chain saves; set by the scheduler."""
        self._pool = pool
        self._idle = pool.idle
        self._block_of: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        """Of every labelled block."""
        self._kin: dict[tuple[bytes, int], dict[int, Entry]] = {}
        """Blocks below one predecessor that begin with one token, in the order in which they came."""
        self._tenants: Counter[str] = Counter()
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        """Full blocks."""
        return len(self._block_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of

    @property
    def tenants(self) -> Counter[str]:
        """Labelled blocks of each tenant. Not to be changed."""
        return self._tenants

    # ---- looking

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is present. Takes no references: valid until `alloc`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_below(self, hashes: Sequence[bytes]) -> int:
        """How many leading `hashes` the next tier has."""
        below = self.below
        if below is None:
            return 0
        return next((i for i, block_hash in enumerate(hashes) if not below.peek(block_hash)), len(hashes))

    def match_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(block, count): a block below `parent` whose first `count` tokens are those of `tokens`, the most of those
        that were compared; (-1, 0) when none has one. Valid as for `match`."""
        best, most = -1, 0
        kin = self._kin.get((parent, tokens[0]), {}) if tokens else {}
        for block, entry in islice(reversed(kin.items()), _COMPARED):
            common = _common(entry.tokens, tokens)
            if common > most:
                best, most = block, common
        return best, most

    def take(self, blocks: Sequence[int]) -> None:
        """A request shares these: one reference and one hit more for each."""
        for block in blocks:
            self._idle.hit(block)
        self._pool.incref(blocks)

    # ---- coming in

    def insert(
        self,
        block_hash: bytes,
        block: int,
        parent: bytes = b"",
        index: int = 0,
        tokens: Sequence[int] = (),
        tenant: str = "",
    ) -> bool:
        """Make a used block's finished content findable. False when another block already has that content, or its
        predecessor is not here."""
        holder = self._block_of.get(block_hash)
        if holder == block:
            return False
        if block in self._entries:
            self._drop(block)
        if holder is not None or (index and parent not in self._block_of):
            return False
        self._enter(block, Entry(block_hash, parent, index, tokens, tenant))
        self._block_of[block_hash] = block
        self.log.stored(block_hash)
        return True

    def insert_partial(self, block: int, parent: bytes, index: int, tokens: Sequence[int], tenant: str) -> bool:
        """The same for the first tokens of a used block that is not full. False when another block has them too."""
        entry = self._entries.get(block)
        if entry is not None:
            if entry.hash != _PARTIAL or len(entry.tokens) == len(tokens):
                return False
            self._drop(block)
        if not tokens or (index and parent not in self._block_of):
            return False
        if self.match_partial(parent, tokens)[1] == len(tokens):
            return False
        self._enter(block, Entry(_PARTIAL, parent, index, tokens, tenant))
        return True

    # ---- going out

    def clear(self, tenant: str | None = None) -> int:
        """Forget all blocks of a tenant, or all: idle ones are free, used ones when they are left. Returns how many."""
        blocks = [block for block, entry in self._entries.items() if tenant is None or entry.tenant == tenant]
        for block in sorted(blocks, key=lambda b: -self._entries[b].index):
            self._drop(block)
        if not len(self.log):
            self.log.cleared()
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises InvariantError unless entries and labelled blocks are the same set, each below its predecessor."""
        labelled = {
            block: label for block in range(self._pool.num_blocks) if (label := self._pool.label_of(block)) is not None
        }
        if labelled != {block: entry.hash for block, entry in self._entries.items()}:
            raise InvariantError("the prefix cache points to a block that does not hold that content")
        if self._block_of != {label: block for block, label in labelled.items() if label != _PARTIAL}:
            raise InvariantError("the prefix cache does not find a block by its hash")
        if any(entry.index and entry.parent not in self._block_of for entry in self._entries.values()):
            raise InvariantError("a cached block can never be hit")
        kin = {block: entry for entries in self._kin.values() for block, entry in entries.items()}
        if kin != {block: entry for block, entry in self._entries.items() if entry.tokens}:
            raise InvariantError("a cached block is not found by its tokens")
        if +self._tenants != Counter(entry.tenant for entry in self._entries.values()):
            raise InvariantError("the counts of tenants' blocks are wrong")
        self._idle.check_integrity({b: self._block_of.get(e.parent, -1) for b, e in self._entries.items()})

    # ---- inside

    def _enter(self, block: int, entry: Entry) -> None:
        size = self._pool.block_size
        is_full = entry.hash != _PARTIAL
        saved_ms = self.saved_ms(entry.index) * (1.0 if is_full else len(entry.tokens) / size)
        name = cache_key(entry.hash) if is_full else None
        self._pool.label(block, entry.hash)
        self._idle.link(block, self._block_of.get(entry.parent, -1), saved_ms, entry.tenant, name)
        self._entries[block] = entry
        self._tenants[entry.tenant] += 1
        if not entry.tokens:
            return
        kin = self._kin.setdefault((entry.parent, entry.tokens[0]), {})
        shorter = [
            other
            for other, known in islice(reversed(kin.items()), _COMPARED)
            if known.hash == _PARTIAL and _common(known.tokens, entry.tokens) == len(known.tokens)
        ]
        kin[block] = entry
        for other in shorter:
            self._drop(other)

    def _forget(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        self._tenants[entry.tenant] -= 1
        if entry.tokens:
            place = (entry.parent, entry.tokens[0])
            del self._kin[place][block]
            if not self._kin[place]:
                del self._kin[place]
        is_full = entry.hash != _PARTIAL
        if is_full:
            del self._block_of[entry.hash]
        self._idle.unlink(block, cache_key(entry.hash) if is_full else None)
        return entry

    def _drop(self, block: int) -> None:
        """And what is below."""
        entry = self._forget(block)
        self._pool.unlabel(block)
        if entry.hash != _PARTIAL:
            self._drop_below(block, entry)
            self.log.removed(entry.hash)

    def _drop_below(self, block: int, entry: Entry) -> None:
        if self._idle.num_kids(block):
            # Rare: a request computed for itself what was here already, and went on below it.
            for below in [b for b, e in self._entries.items() if e.parent == entry.hash]:
                self._drop(below)

    def _evicted(self, block: int) -> None:
        entry = self._forget(block)
        if entry.hash == _PARTIAL:
            return
        if self.below is not None:
            self.below.offer(block, entry.hash, entry.parent, self._idle.saved_ms(block))
        self._drop_below(block, entry)
        self.log.removed(entry.hash)


def _common(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Leading tokens that both have."""
    for place, (one, other) in enumerate(zip(known, tokens, strict=False)):
        if one != other:
            return place
    return min(len(known), len(tokens))
