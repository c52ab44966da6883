"""Which cached block that nobody uses goes first: greedy-dual with frequency, tails of chains before heads.

    worth = L + saved_ms * (0.05 + hits)

`saved_ms` is the prefill time that a hit on the block saves; all blocks have one size, so that it is also the time per
byte. `hits` counts requests that shared the block, over its returns: a block that was evicted and is computed again has
been missed once, and goes on from there. L is the worth of the last block that was evicted, so that what is not hit
ages (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69). A
block without a hit counts a twentieth of one that had its first: prompts that come once flow past those that
come again.

Only leaves are candidates: a block whose predecessor is gone can never be hit. Over its quota a tenant's own least
worthy leaf goes before all others. O(log n) a block; equal worth goes by who was left first.

Does not: know hashes or tokens, or hold references.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from headrace.errors import InvariantError

_FRESH = 0.05
_REMEMBERED = 8
"""Evicted blocks whose hits are remembered, as a multiple of the blocks that there are."""
_Entry = tuple[float, int, int]


class IdleBlocks:
    """Labelled blocks as a forest, and among them those without references. Blocks are 0 .. num_blocks-1."""

    def __init__(self, num_blocks: int) -> None:
        self.quota = num_blocks
        """Idle blocks that a tenant may have before its own go first. Set before any block is labelled."""
        self.evicted_ms = 0.0
        """Prefill time that evictions have given up so far."""
        self._level = 0.0
        self._parent = [-1] * num_blocks
        self._kids = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._depth = [0] * num_blocks
        self._saved_ms = [0.0] * num_blocks
        self._tenant = [""] * num_blocks
        self._idle: dict[int, tuple[float, int]] = {}
        """Block -> (worth, turn in which it was left)."""
        self._leaves: list[_Entry] = []
        """(worth, turn, block), with entries that are no leaf of that turn any more."""
        self._turn = 0
        self._num_idle: dict[str, int] = {}
        self._own_leaves: dict[str, list[_Entry]] = {}
        """By tenant, when there are quotas."""
        self._over: dict[str, None] = {}
        """Tenants over their quotas."""
        self._remembered: OrderedDict[int, int] = OrderedDict()
        self._max_remembered = _REMEMBERED * num_blocks

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._idle

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    # ---- the forest

    def link(self, block: int, parent: int, saved_ms: float, tenant: str = "", name: int | None = None) -> None:
        """A used block gets a place: below `parent` (-1: a head). `name`: of its content, to remember hits by."""
        self._parent[block] = parent
        self._depth[block] = self._depth[parent] + 1 if parent >= 0 else 0
        self._saved_ms[block] = saved_ms
        self._tenant[block] = tenant
        missed = None if name is None else self._remembered.pop(name, None)
        self._hits[block] = 0 if missed is None else missed + 1
        if parent >= 0:
            self._kids[parent] += 1

    def unlink(self, block: int, name: int | None = None) -> None:
        """The block has lost its label. Its parent may be a leaf now."""
        parent, self._parent[block] = self._parent[block], -1
        if name is not None:
            self._remembered[name] = self._hits[block]
            if len(self._remembered) > self._max_remembered:
                self._remembered.popitem(last=False)
        if parent >= 0:
            self._kids[parent] -= 1
            if not self._kids[parent] and (left := self._idle.get(parent)) is not None:
                self._push(parent, *left)

    def hit(self, block: int) -> None:
        """A request shares it."""
        self._hits[block] += 1

    def saved_ms(self, block: int) -> float:
        return self._saved_ms[block]

    def num_kids(self, block: int) -> int:
        return self._kids[block]

    # ---- idle ones

    def add(self, block: int) -> None:
        """The last reference is gone."""
        self._turn += 1
        worth = self._level + self._saved_ms[block] * (_FRESH + self._hits[block])
        self._idle[block] = left = (worth, self._turn)
        tenant = self._tenant[block]
        count = self._num_idle[tenant] = self._num_idle.get(tenant, 0) + 1
        if count == self.quota + 1:
            self._over[tenant] = None
        if not self._kids[block]:
            self._push(block, *left)

    def remove(self, block: int) -> None:
        """It is used again, or has lost its label."""
        del self._idle[block]
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
        entry = None
        if self._over:
            entry = self._first(self._own_leaves[next(iter(self._over))])
        if entry is None:
            entry = self._first(self._leaves)
        block = max(self._idle, key=self._depth.__getitem__) if entry is None else entry[2]
        self._level = max(self._level, self._idle[block][0])
        self.evicted_ms += self._saved_ms[block]
        self.remove(block)
        return block

    def next_ms(self) -> float:
        """What the next eviction gives up; 0 when nothing can be evicted."""
        entry = self._first(self._leaves)
        return 0.0 if entry is None else self._saved_ms[entry[2]]

    def idle_of(self, tenant: str) -> int:
        """Idle blocks of a tenant."""
        return self._num_idle.get(tenant, 0)

    def check_integrity(self, parents: Mapping[int, int]) -> None:
        """Raises InvariantError unless `parents` (labelled block -> parent or -1) is this forest, and counts agree."""
        kids = Counter(parent for parent in parents.values() if parent >= 0)
        for block in range(len(self._parent)):
            if self._parent[block] != parents.get(block, -1) or self._kids[block] != kids[block]:
                raise InvariantError(f"block {block} has another place than its content")
        if not kids.keys() <= parents.keys() or not self._idle.keys() <= parents.keys():
            raise InvariantError("a block has followers, or is kept, without a label")
        if self._num_idle != Counter(self._tenant[block] for block in self._idle):
            raise InvariantError("the counts of tenants' idle blocks are wrong")
        if set(self._over) != {tenant for tenant, count in self._num_idle.items() if count > self.quota}:
            raise InvariantError("a tenant over its quota is not noted, or one within it is")
        valid = {entry[2] for entry in self._leaves if self._is_leaf(entry)}
        if valid != {block for block in self._idle if not self._kids[block]}:
            raise InvariantError("an idle leaf is no candidate for eviction")

    # ---- inside

    def _is_leaf(self, entry: _Entry) -> bool:
        worth, turn, block = entry
        return self._idle.get(block) == (worth, turn) and not self._kids[block]

    def _first(self, heap: list[_Entry]) -> _Entry | None:
        while heap:
            if self._is_leaf(heap[0]):
                return heap[0]
            heappop(heap)
        return None

    def _push(self, block: int, worth: float, turn: int) -> None:
        entry = (worth, turn, block)
        self._push_on(self._leaves, entry, len(self._idle))
        if self.quota < len(self._parent):
            tenant = self._tenant[block]
            self._push_on(self._own_leaves.setdefault(tenant, []), entry, self._num_idle[tenant])

    def _push_on(self, heap: list[_Entry], entry: _Entry, num_idle: int) -> None:
        heappush(heap, entry)
        if len(heap) > 2 * num_idle + 64:
            heap[:] = {kept for kept in heap if self._is_leaf(kept)}
            heapify(heap)
