"""Where cached blocks are beside the device: in host memory and on disk. Actions out, facts in; no bytes, no clocks.

    host   see `workers.core.host_tier`
    disk   (none) --Spill--> SPILLING --written--> STORED --room is needed, or corrupt--> (none), Forget

Tiers overlap: a block may be on the device, in the host and on disk at once. Every action has a ticket; a fact with an
unknown one is a duplicate and changes nothing. A block that is dropped while it is written has its file deleted
afterwards. The shell does Forgets and Spills in the order in which it got them, so a file that is to go is gone before
the same block is written again, and the disk never holds more than its bound.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from headrace.errors import InvariantError
from workers.core.host_blocks import HostBlocks
from workers.core.host_tier import Copy, HostTier, Place
from workers.core.tail_first import TailFirst
from workers.core.tier_actions import Block, Forget, Outcome, Promote, Spill

DISK_PAUSE_S = 30.0
"""After an error of the disk nothing is written for so long."""


class Tiers(HostTier):
    """disk_blocks: bound of the disk tier. Nothing is written before `scanned`."""

    def __init__(self, host: HostBlocks, disk_blocks: int = 0) -> None:
        super().__init__(host)
        self.disk_blocks = disk_blocks
        self._disk: dict[bytes, Copy] = {}
        self._disk_order = TailFirst()
        self._disk_leaving: set[Copy] = set()
        self._num_stored = 0
        self._num_disk_free = disk_blocks
        self._unspilled: OrderedDict[bytes, None] = OrderedDict()
        """Held in the host, not on disk, and still to be looked at; the first one next."""
        self._forgets: list[Forget] = []
        self._is_scanned = not disk_blocks
        self._disk_off_until = 0.0
        self._cleared: set[bytes | None] = set()
        """What was cleared before all files were known; None: everything."""
        self._writing: dict[int, tuple[Copy, Copy]] = {}

    def has(self, block_hash: bytes) -> bool:
        """A tier can give the block back."""
        stored = self._disk.get(block_hash)
        return super().has(block_hash) or (stored is not None and stored.place is Place.STORED)

    def run(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """How many of `hashes` from `start` on the tiers have, without a gap."""
        end = start
        while end < len(hashes) and self.has(hashes[end]):
            end += 1
        return end - start

    @property
    def disk_cached(self) -> int:
        """Blocks that can be read."""
        return self._num_stored

    @property
    def disk_busy(self) -> int:
        """Blocks that are being written."""
        return len(self._writing)

    @property
    def free_disk_blocks(self) -> int:
        return self._num_disk_free

    # ---- host -> disk

    def writes(self, most: int, least_value_ms: float, now: float) -> list[Spill | Forget]:
        """What the disk is to do next, in this order; at most so many spills, of blocks worth it."""
        actions: list[Spill | Forget] = []
        for _ in range(most if self._is_scanned and now >= self._disk_off_until else 0):
            spill = self._spill(least_value_ms)
            actions += self._forgets
            self._forgets = []
            if spill is None:
                break
            actions.append(spill)
        actions += self._forgets
        self._forgets = []
        return actions

    def spilled(self, ticket: int, outcome: Outcome, now: float) -> None:
        """A write is over. A duplicate is a no-op."""
        held, stored = self._writing.pop(ticket, (None, None))
        if held is None or stored is None:
            return
        self._unpin(held)
        if outcome is Outcome.DONE:
            self.counters["spills"] += 1
        else:
            self._disk_failed(now)
            if not stored.dropped:
                self._drop_disk(stored)
            if not held.dropped:
                self._unspilled[held.block.hash] = None
        if stored.dropped:
            self._disk_leaving.discard(stored)
            self._num_disk_free += 1
            self._forgets.append(Forget(stored.block.hash))
            return
        new = not self.has(stored.block.hash)
        stored.place = Place.STORED
        self._num_stored += 1
        if new:
            self.on_kept(stored.block.hash)

    # ---- disk -> host

    def promote(self, hashes: Sequence[bytes], tag: bytes | None) -> list[Promote]:
        """Read what of the leading run is stored and not in the host, as far as there is room; only what is of `tag`,
        if one is given."""
        actions: list[Promote] = []
        for block_hash in hashes:
            if block_hash in self._host:
                continue
            stored = self._disk.get(block_hash)
            if stored is None or stored.place is not Place.STORED or tag not in (None, stored.block.tag):
                break
            host_block = self._room_in_host()
            if host_block is None:
                break
            stored.hits += 1
            self._disk_order.touch(block_hash, stored.worth)
            copy = Copy(stored.block, Place.PROMOTING, host_block, hits=stored.hits, from_disk=True)
            actions.append(Promote(self._enter(copy), host_block, stored.block))
        return actions

    def promoted(self, ticket: int, outcome: Outcome, now: float) -> bool:
        """A read is over. False: the block is not there, nobody wants it any more, or a duplicate."""
        copy = self._copying.pop(ticket, None)
        if copy is None:
            return False
        if outcome is Outcome.DONE or copy.dropped:
            self.counters["promotions"] += 1
            return self._arrived(copy)
        if outcome is Outcome.CORRUPT:
            self.counters["disk_corrupt"] += 1
        else:
            self._disk_failed(now)
        stored = self._disk.get(copy.block.hash)
        if stored is not None:
            self._drop_disk(stored)
        self._drop_host(copy)
        return self._arrived(copy)

    # ---- what is on disk at the start

    def found(self, block: Block) -> None:
        """A file of an earlier life; tell the most recently used ones last. It goes where there is no room for it."""
        if block.hash in self._disk:
            return
        if self._cleared & {None, block.tag} or not self._num_disk_free:
            self._forgets.append(Forget(block.hash))
            return
        new = not self.has(block.hash)
        self._disk[block.hash] = stored = Copy(block, Place.STORED)
        self._num_disk_free -= 1
        self._num_stored += 1
        self._disk_order.add(block.hash, block.parent, stored.worth)
        self._unspilled.pop(block.hash, None)
        self.by_tag[block.tag] += 1
        if new:
            self.on_kept(block.hash)

    def scanned(self) -> None:
        """All files are known."""
        self._is_scanned = True
        self._cleared.clear()

    def end_disk(self) -> None:
        """There is no disk tier after all. Before `scanned` only; what was found is left where it is."""
        for stored in list(self._disk.values()):
            self._drop_disk(stored)
        self._forgets.clear()
        self._unspilled.clear()
        self.disk_blocks = self._num_disk_free = 0
        self.scanned()

    # ---- dropping, checking

    def clear(self, tag: bytes | None) -> None:
        """See `HostTier.clear`; files that are not known yet go when they are found."""
        if not self._is_scanned:
            self._cleared.add(tag)
        super().clear(tag)
        for stored in [stored for stored in self._disk.values() if tag is None or stored.block.tag == tag]:
            self._drop_disk(stored)

    def check_integrity(self) -> None:
        """Raises InvariantError unless entries, orders and counts agree. O(blocks)."""
        self._check(self._host, self._host_order, self._leaving)
        self._check(self._disk, self._disk_order, self._disk_leaving)
        if self._num_busy != sum(copy.is_busy for copy in self._host.values()):
            raise InvariantError("the count of busy host blocks is wrong")
        stored = sum(copy.place is Place.STORED for copy in self._disk.values())
        held = len(self._disk) + len(self._disk_leaving)
        if (stored, held - stored) != (self._num_stored, len(self._writing)):
            raise InvariantError("the count of stored blocks, or of those being written, is wrong")
        if held + self._num_disk_free != self.disk_blocks or self._num_disk_free < 0:
            raise InvariantError("the disk tier has lost room, or is over its bound")
        tags = Counter(copy.block.tag for copy in [*self._host.values(), *self._disk.values()])
        if self.by_tag != tags:
            raise InvariantError("the counts of tenants' blocks are wrong")
        if any(h not in self._host or h in self._disk for h in self._unspilled):
            raise InvariantError("a block waits to be written that is not in the host, or written already")

    # ---- inside

    def _arrived(self, copy: Copy) -> bool:
        if not super()._arrived(copy):
            return False
        if self.disk_blocks and copy.block.hash not in self._disk:
            self._unspilled[copy.block.hash] = None
        return True

    def _drop_host(self, copy: Copy) -> None:
        self._unspilled.pop(copy.block.hash, None)
        super()._drop_host(copy)

    def _drop_disk(self, stored: Copy) -> None:
        block_hash = stored.block.hash
        had = self.has(block_hash)
        del self._disk[block_hash]
        self._disk_order.discard(block_hash)
        self._untag(stored.block.tag)
        stored.dropped = True
        if stored.is_busy:
            self._disk_leaving.add(stored)  # its file goes when it is written
        else:
            self._num_stored -= 1
            self._num_disk_free += 1
            self._forgets.append(Forget(block_hash))
        if had and not self.has(block_hash):
            self.on_gone(block_hash)

    def _spill(self, least_value_ms: float) -> Spill | None:
        while self._unspilled:
            held = self._host[next(iter(self._unspilled))]
            while held.block.parent in self._unspilled:
                held = self._host[held.block.parent]  # heads first: a tail alone is never found
            block_hash = held.block.hash
            del self._unspilled[block_hash]
            if held.block.value_ms < least_value_ms or not self._room_on_disk():
                continue
            self._disk[block_hash] = stored = Copy(held.block, Place.SPILLING, hits=held.hits)
            self._num_disk_free -= 1
            self._disk_order.add(block_hash, held.block.parent, stored.worth)
            self.by_tag[held.block.tag] += 1
            self._pin(held)
            ticket = next(self._tickets)
            self._writing[ticket] = (held, stored)
            return Spill(ticket, held.host_block, held.block)
        return None

    def _room_on_disk(self) -> bool:
        if self._num_disk_free:
            return True
        victim = self._disk_order.lowest(self._may_leave_disk)
        if victim is None:
            return False
        self.counters["disk_evictions"] += 1
        self._disk_order.give_up(victim)
        self._drop_disk(self._disk[victim])
        return True

    def _may_leave_disk(self, block_hash: bytes) -> bool:
        copy = self._host.get(block_hash)
        return self._disk[block_hash].place is Place.STORED and (copy is None or copy.place is not Place.PROMOTING)

    def _disk_failed(self, now: float) -> None:
        self.counters["disk_errors"] += 1
        self._disk_off_until = now + DISK_PAUSE_S
