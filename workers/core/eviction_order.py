"""Idle leaves in the order in which they are evicted: the first ones in a sorted list, the others in a heap behind it.

    front   sorted: what goes next, to be looked at from the first on; none of it comes after anything of the heap
    heap    everything else

Entries are (worth, turn, block). One that is no leaf of that turn any more is left where it is until it comes to the
front, or until there are more of them than of others. O(log n) an entry, on average over many.

Does not: know what makes an entry a leaf; its owner tells.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from headrace.errors import InvariantError

Entry = tuple[float, int, int]
_FRONT = 1024
"""Entries of the front at most; then half of them go to the heap."""


class EvictionOrder:
    def __init__(self, is_leaf: Callable[[Entry], bool]) -> None:
        self._is_leaf = is_leaf
        self._front: list[Entry] = []
        self._heap: list[Entry] = []

    def add(self, entry: Entry, num_idle: int) -> None:
        """`num_idle`: at least the leaves that there are."""
        front, heap = self._front, self._heap
        if front and entry < front[-1]:
            insort(front, entry)
            if len(front) > _FRONT:
                for late in front[_FRONT // 2 :]:
                    heappush(heap, late)
                del front[_FRONT // 2 :]
            return
        heappush(heap, entry)
        if len(heap) > 2 * num_idle + 64:
            heap[:] = {kept for kept in heap if self._is_leaf(kept)}
            heapify(heap)

    def first(self) -> int:
        """The block that goes next, -1 without one."""
        front = self._front
        while front or self._heap:
            if not front:
                front.append(heappop(self._heap))
            elif self._is_leaf(front[0]):
                return front[0][2]
            else:
                del front[0]
        return -1

    def look_ahead(self, most: int, steps: int) -> bool:
        """Have the first `most` leaves at the front, with so many steps at most. False: some are missing there."""
        front, heap = self._front, self._heap
        front[:] = filter(self._is_leaf, front)
        while len(front) < most and heap and steps > 0:
            entry = heappop(heap)
            if self._is_leaf(entry):
                front.append(entry)
            steps -= 1
        return len(front) >= most or not heap

    @property
    def is_all_ahead(self) -> bool:
        """Nothing comes behind the front."""
        return not self._heap

    def ahead(self) -> Iterator[Entry]:
        """The leaves at the front, in order; perhaps one twice. Valid until something changes."""
        return filter(self._is_leaf, self._front)

    def check_integrity(self, leaves: set[Entry]) -> None:
        """Raises InvariantError unless every leaf is here, and the front is in order and before the rest."""
        front, heap = self._front, self._heap
        if not leaves <= {*front, *heap}:
            raise InvariantError("an idle leaf is no candidate for eviction")
        if front != sorted(front) or (front and heap and min(heap) < front[-1]):
            raise InvariantError("candidates for eviction are not in order")
