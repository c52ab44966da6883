"""What changed in a worker's cache, for the routers' indexes (SPEC E3): a bounded ring of the latest changes.

A key counts as stored while any tier has it: each tier says `stored` and `removed` for itself, and only the first and
the last of them are changes. A reader keeps (epoch, sequence number) and asks for what came after; who is too far
behind, or of another epoch, gets everything that is cached.

    changes(since) = net of the ring's entries after `since`   when the ring still has them all
                   = a snapshot                                otherwise

O(1) a change. Does not: know blocks, tiers or readers.
"""

from __future__ import annotations

from headrace.core.records import CacheChange, cache_key
from headrace.errors import InvariantError

_CAPACITY = 1 << 16


class CacheLog:
    """`capacity`: changes that a reader may be behind without a snapshot."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.epoch = 1
        self.seq = 0
        """Number of the latest change; it goes on over epochs."""
        self._capacity = capacity
        self._ring: list[int] = []
        """The change with number n at (n - 1) % capacity: a key when stored, its complement when removed."""
        self._oldest = 0
        """Changes up to this number are not in the ring."""
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Keys that are cached."""
        return len(self._holders)

    def stored(self, block_hash: bytes) -> None:
        """One tier more has the block."""
        self.key_stored(cache_key(block_hash))

    def removed(self, block_hash: bytes) -> None:
        """One tier less has the block. Raises InvariantError when none had it."""
        self.key_removed(cache_key(block_hash))

    def key_stored(self, key: int) -> None:
        """`stored` for who keeps keys."""
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if not holders:
            self._append(key)

    def key_removed(self, key: int) -> None:
        """`removed` for who keeps keys."""
        holders = self._holders.get(key, 0)
        if not holders:
            raise InvariantError("a block leaves a cache that does not have it")
        if holders > 1:
            self._holders[key] = holders - 1
            return
        del self._holders[key]
        self._append(~key)

    def cleared(self) -> None:
        """All tiers are empty: a new epoch. Cheaper for readers than one removal after the other."""
        self._holders.clear()
        self.epoch += 1
        self._oldest = self.seq

    def changes(self, since_epoch: int, since_seq: int, most: int) -> CacheChange:
        """What a reader at (since_epoch, since_seq) lacks, from at most `most` changes; a snapshot is never cut.

        (0, 0): a reader that knows nothing. The reader is up to date when `to_seq` is `seq`.
        """
        if since_epoch != self.epoch or not self._oldest <= since_seq <= self.seq:
            return CacheChange(self.epoch, 0, self.seq, tuple(self._holders), is_snapshot=True)
        to_seq = min(self.seq, since_seq + most)
        # A key's changes alternate: an odd number of them is its last one, an even number none.
        net: dict[int, int] = {}
        for number in range(since_seq, to_seq):
            entry = self._ring[number % self._capacity]
            key = entry if entry >= 0 else ~entry
            if net.pop(key, None) is None:
                net[key] = entry
        stored = tuple(key for key, entry in net.items() if entry >= 0)
        removed = tuple(key for key, entry in net.items() if entry < 0)
        return CacheChange(self.epoch, since_seq, to_seq, stored, removed)

    def _append(self, entry: int) -> None:
        place = self.seq % self._capacity
        if place < len(self._ring):
            self._ring[place] = entry
        else:
            self._ring.append(entry)
        self.seq += 1
        if self.seq - self._oldest > self._capacity:
            self._oldest = self.seq - self._capacity
