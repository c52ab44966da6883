"""Which blocks workers are expected to have soon, because of the requests that were sent to them: one ticket a request.

Chains of keys that begin alike share spans: a tree in which a span is a stretch of blocks that the same tickets name,
found by its first block. Keys are chained hashes: where two chains are equal they are equal before that too,
so where they part is found by halving. A ticket costs a look at each span on its way, however many blocks it names, and
its keys are the tuple that the caller gave, not a copy.

Does not: know what workers have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeVar

Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class _Ticket:
    slot: int
    keys: tuple[int, ...]
    ready_at: float
    is_read: bool


@dataclass(slots=True)
class _Span:
    """Blocks first .. end - 1 of a chain."""

    keys: tuple[int, ...]
    """Of a ticket that goes on until `end` at least."""
    first: int
    end: int
    num_tickets: int
    claims: dict[int, int]
    """Slot -> how many of its tickets name these blocks."""
    mask: int
    """Those slots."""

    def common(self, keys: Sequence[int]) -> int:
        """Where a chain that has the first block here stops being this one; at most `end`."""
        last = min(self.end, len(keys))
        if self.keys[last - 1] == keys[last - 1]:
            return last
        return bisect_left(range(last), True, self.first + 1, last - 1, key=lambda i: self.keys[i] != keys[i])


class Expectations:
    """Slots are small numbers. max_blocks: that live tickets name in all; one that would name more claims nothing."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.num_blocks = 0
        """That live tickets name, each for itself."""
        self._spans: dict[tuple[int, int], _Span] = {}
        """(Place, key) of the first block -> span."""
        self._tickets: dict[int, _Ticket] = {}
        self._by_slot: dict[int, dict[int, None]] = {}
        """Tickets of each slot that has some, in order."""
        self._by_last: dict[tuple[int, int], dict[int, None]] = {}
        """(Slot, last key) -> tickets."""
        self._due: list[tuple[float, int]] = []
        self._next_ticket = 1
        self._places: dict[int, int] = {}
        """Key -> place in its chain, of the blocks where the latest runs end."""

    def of(self, slot: int) -> int:
        """Tickets of a slot that claim something."""
        return len(self._by_slot.get(slot, ()))

    def add(self, slot: int, keys: tuple[int, ...], until: float, ready_at: float, is_read: bool) -> int:
        """The ticket: these blocks are expected there until `until`. Without keys it claims nothing."""
        number, self._next_ticket = self._next_ticket, self._next_ticket + 1
        if not keys or self.num_blocks + len(keys) > self._max_blocks:
            return number
        self.num_blocks += len(keys)
        self._tickets[number] = _Ticket(slot, keys, ready_at, is_read)
        self._by_slot.setdefault(slot, {})[number] = None
        self._by_last.setdefault((slot, keys[-1]), {})[number] = None
        heappush(self._due, (until, number))
        at = 0
        while at < len(keys):
            span = self._spans.get((at, keys[at]))
            if span is None:
                span = self._spans[at, keys[at]] = _Span(keys, at, len(keys), 0, {}, 0)
            elif (end := span.common(keys)) < span.end:
                self._split(span, end)
            span.num_tickets += 1
            span.claims[slot] = span.claims.get(slot, 0) + 1
            span.mask |= 1 << slot
            at = span.end
        return number

    def withdraw(self, number: int) -> None:
        """Idempotent."""
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return
        slot, keys = ticket.slot, ticket.keys
        self.num_blocks -= len(keys)
        _remove(self._by_slot, slot, number)
        _remove(self._by_last, (slot, keys[-1]), number)
        before: _Span | None = None
        at = 0
        while at < len(keys):
            span = self._spans.get((at, keys[at]))
            if span is None or slot not in span.claims:
                break  # two chains had the same key: their hashes are short
            at = span.end
            span.num_tickets -= 1
            span.claims[slot] -= 1
            if not span.claims[slot]:
                del span.claims[slot]
                span.mask &= ~(1 << slot)
            if not span.num_tickets:
                del self._spans[span.first, keys[span.first]]
            elif before is not None and before.num_tickets == span.num_tickets:
                # Nobody parts here any more.
                del self._spans[span.first, keys[span.first]]
                before.keys, before.end = span.keys, span.end
            else:
                before = span

    def told(self, slot: int, key: int) -> None:
        """The worker has this block now, and with it all before it."""
        for number in list(self._by_last.get((slot, key), ())):
            self.withdraw(number)

    def expire(self, now: float) -> None:
        """Withdraws what was expected by now."""
        while self._due and self._due[0][0] <= now:
            self.withdraw(heappop(self._due)[1])

    def forget(self, slot: int) -> None:
        """Nothing is expected there any more."""
        for number in list(self._by_slot.get(slot, ())):
            self.withdraw(number)

    def runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Where what is expected of `keys` ends: (mask of slots that go on until there at least, blocks)."""
        runs: list[tuple[int, int]] = []
        at = 0
        while at < len(keys) and (span := self._spans.get((at, keys[at]))) is not None:
            end = span.common(keys)
            runs.append((span.mask, end))
            if end < span.end:
                break
            at = end
        self._places = {keys[end - 1]: end for _, end in runs}
        return runs

    def coming(self, slot: int, key: int) -> tuple[float, bool]:
        """(ready_at, is_read) of the first ticket of the slot that names the block `key`, where one of the latest
        `runs` ends; (0.0, False): there is none."""
        place = self._places.get(key, 0)
        for number in self._by_slot.get(slot, ()) if place else ():
            ticket = self._tickets[number]
            if len(ticket.keys) >= place and ticket.keys[place - 1] == key:
                return ticket.ready_at, ticket.is_read
        return 0.0, False

    def _split(self, span: _Span, at: int) -> None:
        rest = _Span(span.keys, at, span.end, span.num_tickets, dict(span.claims), span.mask)
        self._spans[at, span.keys[at]] = rest
        span.end = at


def _remove(tickets: dict[Place, dict[int, None]], place: Place, number: int) -> None:
    here = tickets[place]
    del here[number]
    if not here:
        del tickets[place]
