"""Which worker has which block: built from the workers' cache changes, asked for the leading run of a prompt.

One dictionary from block key to a bit mask of worker slots, and for each slot the set of keys that its worker has
told of. Beside it, a tree of what workers are expected to make (`router.core.expectations`); a worker's run is the
longer one. Keys are chained hashes, so a key stands for everything before it too; what is wrong here costs a wrong
guess of where a prefix is, never a wrong block. Does not: know time of its own, ask for snapshots, know why a block is
there.

| invariant | kept by |
| --- | --- |
| nothing is claimed of a position that was not told | a change that does not continue the known one is a gap |
| what is refused at the cap is asked for again | `behind` is true of such a worker as soon as there is room |
| a mask without bits is not kept | `_unset` |
| a bit is set exactly while its worker told of the block | `_take`, `_drop` |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.records import CacheChange
from router.core.expectations import Expectations

DEFAULT_MAX_ENTRIES = 4_000_000
_BYTES_PER_BLOCK = 100
_BYTES_PER_ENTRY = 50
_BYTES_PER_EXPECTED = 40
_MOST_ROWS = 1024
_FEW = 6
"""Workers that are faster set one by one."""
ROOM_SHARE = 0.9
"""A worker that was refused entries is asked for a snapshot when no more than this share of the cap is in use."""


@dataclass(slots=True)
class _Slot:
    epoch: int = -1
    seq: int = 0
    in_gap: bool = True
    """Nothing that was told can be continued until a snapshot comes."""
    was_refused: bool = False
    keys: set[int] = field(default_factory=set)


class PrefixIndex:
    """See the module's docstring. Slots are small numbers that the caller gives to workers, and may give again."""

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        """max_entries: (block, worker) pairs that workers told of, and as many that are expected."""
        self._max_entries = max_entries
        self._masks: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._expected = Expectations(max_entries)
        self._rows: dict[int, NDArray[np.int64]] = {}
        self._width = 64
        self.entries = 0
        """(Block, worker) pairs told by workers."""
        self.refused_entries = 0
        """Pairs not taken for want of room, since the start."""

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that workers told of."""
        return len(self._masks)

    @property
    def memory_bytes(self) -> int:
        """An estimate: the table of masks, a key, mostly a shared mask, an entry in a worker's set; keys of tickets."""
        told = _BYTES_PER_BLOCK * len(self._masks) + _BYTES_PER_ENTRY * self.entries
        return told + _BYTES_PER_EXPECTED * self._expected.num_blocks

    # ---- what the workers tell

    def apply(self, slot: int, change: CacheChange) -> bool:
        """Takes a change; old and repeated ones are ignored. False: one before it is missing, ask for a snapshot."""
        known = self._slot(slot)
        told, have = (change.epoch, change.to_seq), (known.epoch, known.seq)
        if told < have or (told == have and not change.is_snapshot):
            return not known.in_gap
        if change.is_snapshot:
            self._replace(slot, known, change)
            return True
        if change.epoch > known.epoch:
            self._drop(slot, known, known.keys)
        if known.in_gap or change.epoch != known.epoch or change.from_seq != known.seq:
            known.in_gap = True
            return False
        self._drop(slot, known, change.removed)
        self._take(slot, known, change.stored)
        known.seq = change.to_seq
        return True

    def behind(self, slot: int, epoch: int, seq: int) -> bool:
        """Whether a snapshot is needed, given where the worker says that its changes stand."""
        known = self._slots.get(slot)
        if known is None or known.in_gap:
            return True
        if known.was_refused and self.entries <= ROOM_SHARE * self._max_entries:
            return True
        return (epoch, seq) > (known.epoch, known.seq)

    def forget(self, slot: int) -> None:
        """The worker is gone: its entries go, and what was expected of it."""
        known = self._slots.pop(slot, None)
        if known is None:
            return
        self._unset(slot, known.keys)
        self.entries -= len(known.keys)
        self._expected.forget(slot)

    # ---- what this gateway expects

    def expect(self, slot: int, keys: Sequence[int], until: float, ready_at: float = 0.0, is_read: bool = False) -> int:
        """A request that was just sent there will make these blocks, or keep them: claims them until the worker has
        told of all, the ticket returned is withdrawn, or `until` has passed. `ready_at`: when they should be there;
        `is_read`: they come from a peer. At the cap nothing is claimed. O(log keys) for each place where chains part.
        """
        known = self._slot(slot)
        is_told = not keys or keys[-1] in known.keys
        return self._expected.add(slot, () if is_told else tuple(keys), until, ready_at, is_read)

    def withdraw(self, ticket: int) -> None:
        """The request did not get there. Idempotent."""
        self._expected.withdraw(ticket)

    def expire(self, now: float) -> None:
        """Withdraws what was expected by now."""
        self._expected.expire(now)

    # ---- what is asked

    def runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Where workers' leading runs of `keys` end: (mask of those that go on until there, blocks), shortest first."""
        told, expected = self._told_runs(keys), self._expected.runs(keys)
        if not expected:
            return told
        ends: list[tuple[int, int]] = []
        mask = 0
        for going, end in sorted([*told, *expected], key=lambda run: -run[1]):
            if going | mask == mask:
                continue
            mask |= going
            if ends and ends[-1][1] == end:
                ends.pop()
            ends.append((mask, end))
        return ends[::-1]

    def _told_runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Workers drop a chain's tail before its head, so one that has a block has all before it, and each end is
        found by doubling steps and halving, in a few looks however long the prompt is.
        """
        get, count = self._masks.get, len(keys)
        ends: list[tuple[int, int]] = []
        mask, at = get(keys[0], 0) if count else 0, 0
        while mask:
            # All of `mask` have block `at`; `after` is the first that is known to lack one of them.
            after, have, step = count, 0, 1
            while at + step < after:
                have = get(keys[at + step], 0) & mask
                if have != mask:
                    after = at + step
                    break
                at += step
                step += step
            while after - at > 1:
                middle = (at + after) // 2
                there = get(keys[middle], 0) & mask
                if there == mask:
                    at = middle
                else:
                    after, have = middle, there
            ends.append((mask, at + 1))
            if after == count:
                break
            mask, at = have, after
        return ends

    def lookup(self, keys: Sequence[int], num_slots: int) -> NDArray[np.int64]:
        """[num_slots] blocks of the leading run of `keys` that each worker has."""
        depths = np.zeros(max(num_slots, self._width), np.int64)
        ends = self.runs(keys)
        for at, (mask, end) in enumerate(ends):
            ending = mask & ~ends[at + 1][0] if at + 1 < len(ends) else mask
            if ending.bit_count() > _FEW:
                row = self._row(ending)
                depths[: len(row)] += row * end
                continue
            while ending:
                slot = ending.bit_length() - 1
                depths[slot] = end
                ending ^= 1 << slot
        return depths[:num_slots]

    def told(self, keys: Sequence[int], depths: NDArray[np.int64]) -> NDArray[np.int64]:
        """`depths` of `lookup` without blocks that are only expected: what can be read from each worker now."""
        held = depths
        for slot in np.flatnonzero(depths).tolist():
            known = self._slots[slot]
            if not self._expected.of(slot):
                continue
            low, high = 0, int(depths[slot])
            while low < high:
                middle = (low + high + 1) // 2
                if keys[middle - 1] in known.keys:
                    low = middle
                else:
                    high = middle - 1
            if low < depths[slot]:
                held = held.copy() if held is depths else held
                held[slot] = low
        return held

    def coming(self, slot: int, key: int) -> tuple[float, bool]:
        """Of the last block of a run of the latest `lookup`: (when it should be there, whether it comes from a peer);
        (0.0, False): not known."""
        return self._expected.coming(slot, key)

    def holders(self, key: int) -> list[int]:
        """Slots whose workers told of this block."""
        mask = self._masks.get(key, 0)
        return [slot for slot in range(mask.bit_length()) if mask >> slot & 1]

    def keys_of(self, slot: int) -> frozenset[int]:
        """What the worker has told of."""
        known = self._slots.get(slot)
        return frozenset(known.keys) if known else frozenset()

    # ---- inside

    def _slot(self, slot: int) -> _Slot:
        known = self._slots.get(slot)
        if known is None:
            known = self._slots[slot] = _Slot()
            while self._width <= slot:
                self._width *= 2
                self._rows.clear()
        return known

    def _row(self, mask: int) -> NDArray[np.int64]:
        row = self._rows.get(mask)
        if row is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            packed = np.frombuffer(mask.to_bytes(self._width // 8, "little"), np.uint8)
            row = self._rows[mask] = np.unpackbits(packed, bitorder="little").astype(np.int64)
        return row

    def _replace(self, slot: int, known: _Slot, snapshot: CacheChange) -> None:
        stored = set(snapshot.stored)
        self._drop(slot, known, known.keys - stored)
        known.was_refused = False
        known.epoch, known.seq, known.in_gap = snapshot.epoch, snapshot.to_seq, False
        self._take(slot, known, snapshot.stored)

    def _take(self, slot: int, known: _Slot, keys: Iterable[int]) -> None:
        bit, masks, have = 1 << slot, self._masks, known.keys
        for key in keys:
            if key in have:
                continue
            if known.was_refused or self.entries >= self._max_entries:
                # After the first one all are refused: what is kept of a chain is its head.
                known.was_refused = True
                self.refused_entries += 1
                continue
            mask = masks.get(key)
            masks[key] = bit if mask is None else mask | bit
            have.add(key)
            self.entries += 1
            self._expected.told(slot, key)

    def _drop(self, slot: int, known: _Slot, keys: Iterable[int]) -> None:
        gone = [key for key in keys if key in known.keys]
        known.keys.difference_update(gone)
        self.entries -= len(gone)
        self._unset(slot, gone)

    def _unset(self, slot: int, keys: Iterable[int]) -> None:
        bit, masks = 1 << slot, self._masks
        for key in keys:
            mask = masks[key] & ~bit
            if mask:
                masks[key] = mask
            else:
                del masks[key]
