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


class Below(Protocol):
    """The next tier. Called in the midst of an allocation: it may not ask for blocks."""

    def left(self, block_hash: bytes) -> None:
        """A full block is here no more: its bytes may change from now on."""


class PrefixCache:
    def __init__(self, pool: BlockPool, log: CacheLog | None = None) -> None:
        self.log = CacheLog() if log is None else log
        self.below: Below | None = None
        self.saved_ms: Callable[[int], float] = lambda index: 1.0
        """Prefill time that the block at this place of a chain saves; set by the scheduler."""
        self._pool = pool
        self._idle = pool.idle
        self._block_of: dict[bytes, int] = {}
        # Of each labelled block: its name for logs and memories, the hash of its predecessor (or the chain's root), its
        # place in the chain, its tokens, and whose it is.
        self._key = [0] * pool.num_blocks
        self._parent = [b""] * pool.num_blocks
        self._index = [0] * pool.num_blocks
        self._tokens: list[Sequence[int]] = [()] * pool.num_blocks
        self._tenant = [""] * pool.num_blocks
        self._kin: dict[tuple[bytes, int], dict[int, None]] = {}
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

    def content(self, block: int) -> tuple[bytes, bytes, str]:
        """Of a labelled block: its hash (b"" for one that is not full), its predecessor's, and whose it is."""
        return self._pool.label_of(block) or _PARTIAL, self._parent[block], self._tenant[block]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is present. Takes no references: valid until `alloc`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """(block, count): a block below `parent` whose first `count` tokens are those of `tokens`, the most of those
        that were compared; (-1, 0) when none has one. Valid as for `match`."""
        best, most = -1, 0
        kin = self._kin.get((parent, tokens[0]), {}) if tokens else {}
        for block in islice(reversed(kin), _COMPARED):
            common = _common(self._tokens[block], tokens)
            if common > most:
                best, most = block, common
        return best, most

    def take(self, blocks: Sequence[int]) -> None:
        """A request shares these: one reference and one hit more for each."""
        for block in blocks:
            self._idle.hit(block)
        self._pool.incref(blocks)

    def num_tokens_of(self, block: int) -> int:
        """How many of a block's first tokens may be shared from here; 0 when it is not here, or without its tokens."""
        return 0 if self._pool.label_of(block) is None else len(self._tokens[block])

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
        if self._pool.label_of(block) is not None:
            self._drop(block)
        above = self._block_of.get(parent, -1) if index else -1
        if holder is not None or (index and above < 0):
            return False
        self._block_of[block_hash] = block
        key = self._key[block] = cache_key(block_hash)
        self._pool.label(block, block_hash)
        self._idle.link(block, above, self.saved_ms(index), tenant, key)
        self._enter(block, parent, index, tokens, tenant)
        self.log.key_stored(key)
        return True

    def insert_partial(self, block: int, parent: bytes, index: int, tokens: Sequence[int], tenant: str) -> bool:
        """The same for the first tokens of a used block that is not full. False when another block has them too."""
        label = self._pool.label_of(block)
        if label is not None:
            if label != _PARTIAL or len(self._tokens[block]) == len(tokens):
                return False
            self._drop(block)
        above = self._block_of.get(parent, -1) if index else -1
        if not tokens or (index and above < 0) or self.match_partial(parent, tokens)[1] == len(tokens):
            return False
        self._pool.label(block, _PARTIAL)
        saved_ms = self.saved_ms(index) * len(tokens) / self._pool.block_size
        self._idle.link(block, above, saved_ms, tenant, None)
        self._enter(block, parent, index, tokens, tenant)
        return True

    # ---- going out

    def clear(self, tenant: str | None = None) -> int:
        """Forget all blocks of a tenant, or all: idle ones are free, used ones when they are left. Returns how many."""
        blocks = [block for block in self._labelled() if tenant is None or self._tenant[block] == tenant]
        for block in sorted(blocks, key=self._index.__getitem__, reverse=True):
            self._drop(block)
        if not len(self.log):
            self.log.cleared()
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises InvariantError unless hashes and labelled blocks are the same set, each below its predecessor."""
        labelled = {block: self._pool.label_of(block) for block in self._labelled()}
        if self._block_of != {label: block for block, label in labelled.items() if label != _PARTIAL}:
            raise InvariantError("the prefix cache points to a block that does not hold that content")
        if any(self._index[block] and self._parent[block] not in self._block_of for block in labelled):
            raise InvariantError("a cached block can never be hit")
        kin = {block: place for place, blocks in self._kin.items() for block in blocks}
        if kin != {block: (self._parent[block], self._tokens[block][0]) for block in labelled if self._tokens[block]}:
            raise InvariantError("a cached block is not found by its tokens")
        if +self._tenants != Counter(self._tenant[block] for block in labelled):
            raise InvariantError("the counts of tenants' blocks are wrong")
        self._idle.check_integrity({b: self._block_of.get(self._parent[b], -1) for b in labelled})

    # ---- inside

    def _labelled(self) -> list[int]:
        return [block for block in range(self._pool.num_blocks) if self._pool.label_of(block) is not None]

    def _enter(self, block: int, parent: bytes, index: int, tokens: Sequence[int], tenant: str) -> None:
        """What is filled in part and begins this block is of no use any more."""
        self._parent[block] = parent
        self._index[block] = index
        self._tokens[block] = tokens
        self._tenant[block] = tenant
        self._tenants[tenant] += 1
        if not tokens:
            return
        place = (parent, tokens[0])
        kin = self._kin.get(place)
        if kin is None:
            self._kin[place] = {block: None}
            return
        shorter = [
            other
            for other in islice(reversed(kin), _COMPARED)
            if self._pool.label_of(other) == _PARTIAL
            and _common(self._tokens[other], tokens) == len(self._tokens[other])
        ]
        kin[block] = None
        for other in shorter:
            self._drop(other)

    def _forget(self, block: int) -> None:
        """Takes a block that nothing is below any more out of all but the pool."""
        label = self._pool.label_of(block)
        self._tenants[self._tenant[block]] -= 1
        tokens = self._tokens[block]
        if tokens:
            place = (self._parent[block], tokens[0])
            kin = self._kin[place]
            del kin[block]
            if not kin:
                del self._kin[place]
        if label:
            del self._block_of[label]
            if self.below is not None:
                self.below.left(label)
            self.log.key_removed(self._key[block])
        self._idle.unlink(block, self._key[block] if label else None)

    def _drop(self, block: int) -> None:
        """And what is below."""
        self._drop_below(block)
        self._forget(block)
        self._pool.unlabel(block)

    def _drop_below(self, block: int) -> None:
        """Tails before heads. Rare: a request computed for itself what was here already, and went on below it."""
        below = [*self._idle.kids(block)]
        for follower in below:
            below += self._idle.kids(follower)  # the walk goes on over them
        for follower in reversed(below):
            self._forget(follower)
            self._pool.unlabel(follower)

    def _evicted(self, block: int) -> None:
        self._drop_below(block)
        self._forget(block)


def _common(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Leading tokens that both have."""
    for place, (one, other) in enumerate(zip(known, tokens, strict=False)):
        if one != other:
            return place
    return min(len(known), len(tokens))
