"""Which cached block that nobody uses goes first: greedy-dual with frequency, tails of chains before heads.

    worth = L + saved_ms * (0.3 + hits)

`saved_ms` is the prefill time that a hit on the block saves; all blocks have one size, so that it is also the time per
byte. `hits` counts requests that shared the block, over its returns: a block that was evicted and is computed again has
been missed once, and goes on from there. L is the worth of the last block that was evicted, so that what is not hit
ages (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69). A
block without a hit counts less than a quarter of one that had its first: prompts that come once flow past those that
come again, but not so fast that a second turn finds nothing of the first.

Only leaves are candidates: a block whose predecessor is gone can never be hit. Over its quota a tenant's own least
worthy leaf goes before all others. Equal worth goes by who was left first. Where all idle blocks have followers in use,
the deepest one goes: no other idle block goes with it. O(log n) a block, on average over many, in all of it.

Does not: know hashes or tokens, or hold references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush

from headrace.errors import InvariantError
from workers.core.eviction_order import Entry, EvictionOrder

FRESH_HITS = 0.3
"""Of a block that was never hit."""
_REMEMBERED = 8
"""Evicted blocks whose hits are remembered, as a multiple of the blocks that there are."""


class IdleBlocks:
    """Labelled blocks as a forest, and among them those without references. Blocks are 0 .. num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        self.quota = num_blocks
        """Idle blocks that a tenant may have before its own go first. Set before any block is labelled."""
        self.evicted_ms = 0.0
        """Prefill time that evictions have given up so far."""
        self._level = 0.0
        self._count = 0
        self.turns = 0
        """How often a block was left."""
        self._turn = [0] * num_blocks
        """In which each idle block was left; 0: not idle."""
        self._worth = [0.0] * num_blocks
        self._parent = [-1] * num_blocks
        self._kids: dict[int, set[int]] = {}
        """Block -> those right below it; without an entry: a leaf."""
        self._hits = [0] * num_blocks
        self._depth = [0] * num_blocks
        self._saved_ms = [0.0] * num_blocks
        self._tenant = [""] * num_blocks
        self._leaves = EvictionOrder(self._is_leaf)
        self._by_depth: list[tuple[int, int, int]] | None = None
        """A heap of (-depth, turn, block) of idle blocks, from the first time on that there was no leaf; with entries
        that are not idle since that turn any more."""
        self._num_idle: dict[str, int] = {}
        """By tenant, when there are quotas; as the next two."""
        self._own_leaves: dict[str, EvictionOrder] = {}
        self._over: dict[str, None] = {}
        """Tenants over their quotas."""
        self._remembered: dict[int, int] = {}
        """Hits of evicted blocks, and those of blocks evicted before: the elder half is dropped at once."""
        self._elder: dict[int, int] = {}
        self._max_remembered = _REMEMBERED * num_blocks // 2

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return self._turn[block] > 0

    def __iter__(self) -> Iterator[int]:
        return (block for block, turn in enumerate(self._turn) if turn)

    # ---- the forest

    def link(self, block: int, parent: int, saved_ms: float, tenant: str, name: int | None) -> None:
        """A used block gets a place: below `parent` (-1: a head). `name`: of its content, to remember hits by."""
        hits = 0
        if name is not None:
            missed = self._remembered.pop(name, None)
            if missed is None and self._elder:
                missed = self._elder.pop(name, None)
            hits = 0 if missed is None else missed + 1
        self._hits[block] = hits
        self._saved_ms[block] = saved_ms
        self._tenant[block] = tenant
        self._parent[block] = parent
        if parent >= 0:
            self._depth[block] = self._depth[parent] + 1
            self._kids.setdefault(parent, set()).add(block)
        else:
            self._depth[block] = 0

    def unlink(self, block: int, name: int | None) -> None:
        """The block has lost its label. Its parent may be a leaf now."""
        if name is not None:
            self._remembered[name] = self._hits[block]
            if len(self._remembered) > self._max_remembered:
                self._remembered, self._elder = {}, self._remembered
        parent = self._parent[block]
        if parent >= 0:
            self._parent[block] = -1
            kids = self._kids[parent]
            kids.remove(block)
            if not kids:
                del self._kids[parent]
                if self._turn[parent]:
                    self._push(parent)

    def hit(self, block: int) -> None:
        """A request shares it."""
        self._hits[block] += 1

    def saved_ms(self, block: int) -> float:
        return self._saved_ms[block]

    def kids(self, block: int) -> Collection[int]:
        """Blocks right below it. Valid until the forest changes."""
        return self._kids.get(block, ())

    # ---- idle ones

    def add(self, block: int) -> None:
        """The last reference is gone."""
        self.turns += 1
        self._turn[block] = self.turns
        self._worth[block] = self._level + self._saved_ms[block] * (FRESH_HITS + self._hits[block])
        self._count += 1
        if self.quota < len(self._turn):
            tenant = self._tenant[block]
            count = self._num_idle[tenant] = self._num_idle.get(tenant, 0) + 1
            if count > self.quota:
                self._over[tenant] = None
        if block not in self._kids:
            self._push(block)
        if self._by_depth is not None:
            self._push_depth(self._by_depth, block)

    def remove(self, block: int) -> None:
        """It is used again, or has lost its label."""
        self._turn[block] = 0
        self._count -= 1
        if self.quota < len(self._turn):
            tenant = self._tenant[block]
            count = self._num_idle[tenant] = self._num_idle[tenant] - 1
            if count <= self.quota:
                self._over.pop(tenant, None)
            if not count:
                del self._num_idle[tenant]
                self._own_leaves.pop(tenant, None)

    def pop(self) -> int:
        """The block to evict; it is idle no more. Call only when there is one.

        Without a leaf all idle blocks have followers in use: the deepest one goes, and its followers lose their place.
        """
        block = -1
        if self._over and (own := self._own_leaves.get(next(iter(self._over)))) is not None:
            block = own.first()  # none: all have followers
        if block < 0:
            block = self._leaves.first()
        if block < 0:
            block = self._deepest()
        worth = self._worth[block]
        if worth > self._level:
            self._level = worth
        self.evicted_ms += self._saved_ms[block]
        self.remove(block)
        return block

    def coming(self, most: int) -> Iterator[int]:
        """The blocks that are evicted next, in order, as far as quotas do not change it, and as far as `look_ahead` has
        seen to it; at most so many. O(log most) for each. Nothing may change meanwhile.
        """
        leaves = self._leaves.ahead()
        leaf = next(leaves, None)
        bared: list[Entry] = []
        """A heap of those that are leaves once what was told is gone."""
        kids: dict[int, int] = {}
        told = 0
        while told < most and (leaf is not None or (bared and self._leaves.is_all_ahead)):
            if leaf is None or (bared and bared[0] < leaf):
                block = heappop(bared)[2]
            else:
                block, last = leaf[2], leaf
                while leaf == last:
                    leaf = next(leaves, None)
            yield block
            told += 1
            parent = self._parent[block]
            if parent >= 0:
                kids[parent] = kids.get(parent, len(self._kids[parent])) - 1
                if not kids[parent] and self._turn[parent]:
                    heappush(bared, (self._worth[parent], self._turn[parent], parent))

    def look_ahead(self, most: int, steps: int) -> bool:
        """Prepares `coming` for so many, with so many steps at most. False: it will tell of fewer than there are."""
        return self._leaves.look_ahead(most, steps)

    def next_ms(self) -> float:
        """Prefill time that the next eviction is expected to give up: what a hit would save, by how likely one is.

        0 when nothing can be evicted.
        """
        block = self._leaves.first()
        return 0.0 if block < 0 else self._saved_ms[block] * min(1.0, FRESH_HITS + self._hits[block])

    def check_integrity(self, parents: Mapping[int, int]) -> None:
        """Raises InvariantError unless `parents` (labelled block -> parent or -1) is this forest, and counts agree."""
        kids: dict[int, set[int]] = {}
        for block, parent in parents.items():
            if parent >= 0:
                kids.setdefault(parent, set()).add(block)
        idle = set(self)
        for block in range(len(self._parent)):
            if self._parent[block] != parents.get(block, -1) or self._kids.get(block) != kids.get(block):
                raise InvariantError(f"block {block} has another place than its content")
        if not kids.keys() <= parents.keys() or not idle <= parents.keys():
            raise InvariantError("a block has followers, or is kept, without a label")
        counts = Counter(self._tenant[block] for block in idle) if self.quota < len(self._turn) else {}
        if self._num_idle != counts or self._count != len(idle):
            raise InvariantError("the counts of idle blocks are wrong")
        if set(self._over) != {tenant for tenant, count in counts.items() if count > self.quota}:
            raise InvariantError("a tenant over its quota is not noted, or one within it is")
        self._leaves.check_integrity({self._entry(block) for block in idle if block not in self._kids})
        if self._by_depth is not None and not idle <= {b for _, turn, b in self._by_depth if self._turn[b] == turn}:
            raise InvariantError("an idle block is not found by its depth")

    # ---- inside

    def _is_leaf(self, entry: Entry) -> bool:
        _, turn, block = entry
        return self._turn[block] == turn and block not in self._kids

    def _entry(self, block: int) -> Entry:
        return (self._worth[block], self._turn[block], block)

    def _push(self, block: int) -> None:
        entry = self._entry(block)
        self._leaves.add(entry, self._count)
        if self.quota < len(self._turn):
            tenant = self._tenant[block]
            own = self._own_leaves.get(tenant)
            if own is None:
                own = self._own_leaves[tenant] = EvictionOrder(self._is_leaf)
            own.add(entry, self._num_idle[tenant])

    def _deepest(self) -> int:
        """An idle block that no other one is below of. The first call costs O(blocks), once in a life."""
        if self._by_depth is None:
            self._by_depth = [(-self._depth[block], self._turn[block], block) for block in self]
            heapify(self._by_depth)
        while True:
            _, turn, block = self._by_depth[0]
            if self._turn[block] == turn:
                return block
            heappop(self._by_depth)

    def _push_depth(self, heap: list[tuple[int, int, int]], block: int) -> None:
        heappush(heap, (-self._depth[block], self._turn[block], block))
        if len(heap) > 2 * self._count + 64:
            heap[:] = [kept for kept in heap if self._turn[kept[2]] == kept[1]]
            heapify(heap)
