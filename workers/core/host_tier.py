"""Cached blocks in host memory. Actions out, facts in; no bytes, no clocks.

    (none) --Offload--> OFFLOADING --copied--> HELD --room is needed--> (none)
    (none) --Promote--> PROMOTING ---read----> HELD

Whoever needs room drops a block; that is no work, since the block was a copy. One that is dropped while it is copied,
or while a step or a write reads it (pins), cannot be found any more, and its place is free once that is over. A copy
from the device never holds the device up: when the block there is given up first, the copy is worth nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from headrace.errors import InvariantError
from workers.core.host_blocks import HostBlocks
from workers.core.tail_first import TailFirst
from workers.core.tier_actions import Block, Offload

_COUNTERS = (
    "offloads",
    "spoiled_offloads",
    "restores",
    "promotions",
    "spills",
    "host_evictions",
    "disk_evictions",
    "disk_corrupt",
    "disk_errors",
)


class Place(StrEnum):
    OFFLOADING = "offloading"
    PROMOTING = "promoting"
    HELD = "held"
    SPILLING = "spilling"
    STORED = "stored"


@dataclass(slots=True, eq=False)
class Copy:
    """One block in one tier."""

    block: Block
    place: Place
    host_block: int = -1
    pins: int = 0
    dropped: bool = False
    hits: int = 0
    from_disk: bool = False
    """It came to the host from disk, and no step has read it since."""

    @property
    def is_busy(self) -> bool:
        return self.pins > 0 or self.place not in (Place.HELD, Place.STORED)

    @property
    def worth(self) -> float:
        return self.block.value_ms * (1 + self.hits)


class HostTier:
    """The upper half of `workers.core.tiers.Tiers`, which is the one that workers make."""

    def __init__(self, host: HostBlocks) -> None:
        self.on_kept: Callable[[bytes], None] = lambda _: None
        """Told a hash that the tiers can give back from now on."""
        self.on_gone: Callable[[bytes], None] = lambda _: None
        """Told a hash that the tiers cannot give back any more."""
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.by_tag: Counter[bytes] = Counter()
        """Copies of each tenant's blocks."""
        self._host_blocks = host
        self._host: dict[bytes, Copy] = {}
        self._host_order = TailFirst()
        self._leaving: set[Copy] = set()
        """Dropped from the host and still busy."""
        self._num_busy = 0
        """Of those that can be found in the host."""
        self._copying: dict[int, Copy] = {}
        self._tickets = count(1)
        host.reclaimable = lambda: self.host_cached
        host.reclaim = self._reclaim

    def has(self, block_hash: bytes) -> bool:
        """A tier can give the block back."""
        held = self._host.get(block_hash)
        return held is not None and held.place is Place.HELD

    def in_host(self, block_hash: bytes) -> bool:
        """In the host, or on its way there."""
        return block_hash in self._host

    def host_run(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """How many of `hashes` from `start` on the host can give back now, without a gap."""
        end = start
        while end < len(hashes):
            held = self._host.get(hashes[end])
            if held is None or held.place is not Place.HELD:
                break
            end += 1
        return end - start

    @property
    def host_cached(self) -> int:
        """Blocks that can be found, and dropped at once."""
        return len(self._host) - self._num_busy

    @property
    def host_busy(self) -> int:
        """Blocks that are being copied, read or written."""
        return self._num_busy + len(self._leaving)

    def offload(self, block: Block, device_block: int) -> Offload | None:
        """Copy a cached device block to the host. None: it is there already, or nothing can make room for it."""
        if block.hash in self._host:
            return None
        host_block = self._room_in_host()
        if host_block is None:
            return None
        return Offload(self._enter(Copy(block, Place.OFFLOADING, host_block)), device_block, host_block)

    def offloaded(self, ticket: int) -> bool:
        """The copy is over. False: too late, or a duplicate."""
        copy = self._copying.pop(ticket, None)
        if copy is None:
            return False
        self.counters["spoiled_offloads" if copy.dropped else "offloads"] += 1
        return self._arrived(copy)

    def device_evicted(self, block_hash: bytes) -> None:
        """The device block is about to be written to: a copy of it that is not over is worth nothing."""
        copy = self._host.get(block_hash)
        if copy is not None and copy.place is Place.OFFLOADING:
            self._drop_host(copy)

    def pin(self, hashes: Sequence[bytes]) -> list[Copy]:
        """A step reads these, all held in the host: they stay until `unpin`."""
        copies = [self._host[block_hash] for block_hash in hashes]
        for copy in copies:
            copy.hits += 1
            self._host_order.touch(copy.block.hash, copy.worth)
            self._pin(copy)
        self.counters["restores"] += len(copies)
        return copies

    def unpin(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._unpin(copy)

    def clear(self, tag: bytes | None) -> None:
        """Drop what a tenant has, or everything (None)."""
        for copy in [copy for copy in self._host.values() if tag is None or copy.block.tag == tag]:
            self._drop_host(copy)

    def host_blocks(self) -> list[int]:
        """All that the host tier has taken."""
        return [copy.host_block for copy in [*self._host.values(), *self._leaving]]

    # ---- inside

    def _enter(self, copy: Copy) -> int:
        block = copy.block
        self._host[block.hash] = copy
        self._host_order.add(block.hash, block.parent, copy.worth)
        self._num_busy += 1
        self.by_tag[block.tag] += 1
        ticket = next(self._tickets)
        self._copying[ticket] = copy
        return ticket

    def _arrived(self, copy: Copy) -> bool:
        """The bytes of an offload or a promotion are in the host, unless it was dropped meanwhile."""
        new = not copy.dropped and not self.has(copy.block.hash)
        copy.place = Place.HELD
        if copy.dropped:
            self._settle(copy)
            return False
        self._num_busy -= copy.pins == 0
        if new:
            self.on_kept(copy.block.hash)
        return True

    def _pin(self, copy: Copy) -> None:
        self._num_busy += not copy.is_busy
        copy.pins += 1

    def _unpin(self, copy: Copy) -> None:
        if not copy.pins:
            raise InvariantError("a host block is unpinned that is not pinned")
        copy.pins -= 1
        if copy.dropped:
            self._settle(copy)
        else:
            self._num_busy -= not copy.is_busy

    def _settle(self, copy: Copy) -> None:
        """A dropped copy's place is free when nothing reads or writes it."""
        if not copy.is_busy:
            self._leaving.discard(copy)
            self._host_blocks.give_one(copy.host_block)

    def _drop_host(self, copy: Copy) -> None:
        block_hash = copy.block.hash
        had = self.has(block_hash)
        del self._host[block_hash]
        self._host_order.discard(block_hash)
        self._untag(copy.block.tag)
        self._num_busy -= copy.is_busy
        copy.dropped = True
        self._leaving.add(copy)
        self._settle(copy)
        if had and not self.has(block_hash):
            self.on_gone(block_hash)

    def _untag(self, tag: bytes) -> None:
        self.by_tag[tag] -= 1
        if not self.by_tag[tag]:
            del self.by_tag[tag]

    def _room_in_host(self) -> int | None:
        host_block = self._host_blocks.take_one()
        if host_block is not None:
            return host_block
        victim = self._host_order.lowest(lambda block_hash: not self._host[block_hash].is_busy)
        if victim is None:
            return None
        self.counters["host_evictions"] += 1
        self._host_order.give_up(victim)
        self._drop_host(self._host[victim])
        return self._host_blocks.take_one()

    def _reclaim(self, num_blocks: int) -> None:
        """Room for the copies of preempted requests. A busy tail does not keep its head here."""
        for _ in range(num_blocks):
            victim = self._host_order.lowest(lambda block_hash: not self._host[block_hash].is_busy)
            if victim is None:
                victim = next(h for h in reversed(self._host) if not self._host[h].is_busy)
            self.counters["host_evictions"] += 1
            self._drop_host(self._host[victim])

    def _check(self, copies: dict[bytes, Copy], order: TailFirst, leaving: set[Copy]) -> None:
        if len(order) != len(copies) or any(block_hash not in order for block_hash in copies):
            raise InvariantError("a tier's order is not of what it has")
        if any(copy.dropped for copy in copies.values()) or not all(c.dropped and c.is_busy for c in leaving):
            raise InvariantError("a dropped block can be found, or takes room for nothing")
