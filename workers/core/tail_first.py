"""In which order a tier gives blocks up: the least worth first, and of a chain of blocks its tail before its head.

Worth is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
Caching Policy", HP Labs 1998) for blocks of one size: value x (1 + hits), plus what the last block given up was worth
when this one was last wanted. A block whose successor is here is never given up before it: nobody could find the rest.

Every operation is O(log n). Does not: know where blocks are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush


class TailFirst:
    """Keys are block hashes; a parent may be absent."""

    def __init__(self) -> None:
        self._score: dict[bytes, tuple[float, int]] = {}
        self._parent: dict[bytes, bytes] = {}
        self._children: Counter[bytes] = Counter()
        """Of each key, here or not, how many are here."""
        self._leaves: list[tuple[float, int, bytes]] = []
        """Heap of scores, among them some that are no longer true."""
        self._inflation = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._score)

    def __contains__(self, key: bytes) -> bool:
        return key in self._score

    def add(self, key: bytes, parent: bytes, worth: float) -> None:
        """A key that is not here."""
        self._parent[key] = parent
        self._children[parent] += 1
        self.touch(key, worth)

    def touch(self, key: bytes, worth: float) -> None:
        """The key is wanted again, and its worth is this."""
        self._turn += 1
        self._score[key] = (self._inflation + worth, self._turn)
        self._push(key)

    def discard(self, key: bytes) -> None:
        """The key is gone, by whatever way. A no-op for one that is not here."""
        if key not in self._score:
            return
        del self._score[key]
        parent = self._parent.pop(key)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._score:
                self._push(parent)

    def lowest(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """Whom to give up next, of those that may go and have no successor here; it stays until `discard`."""
        kept: list[tuple[float, int, bytes]] = []
        found = None
        while self._leaves:
            entry = self._leaves[0]
            key = entry[2]
            if self._score.get(key) != entry[:2] or key in self._children:
                heappop(self._leaves)
            elif may_go(key):
                found = key
                break
            else:
                kept.append(heappop(self._leaves))
        for entry in kept:
            heappush(self._leaves, entry)
        return found

    def give_up(self, key: bytes) -> None:
        """`discard`, because room was needed: what is wanted from now on is worth more than what this was."""
        self._inflation = max(self._inflation, self._score[key][0])
        self.discard(key)

    def _push(self, key: bytes) -> None:
        if key in self._children:
            return
        heappush(self._leaves, (*self._score[key], key))
        if len(self._leaves) > 2 * len(self._score) + 64:
            self._leaves = [(*score, k) for k, score in self._score.items() if k not in self._children]
            heapify(self._leaves)
