"""One lease at its holder: blocks of a request, or of its cache, pinned for one reader. Facts in, actions out.

    OPEN --handed_off--> SEALED --verify--> HELD --close(completed)--> ENDED
      |                     |                 |
      +---------------------+-----------------+--- close, broken, revoke, request_ended, protocol fault ---> ENDED

The pin lasts from the grant to ENDED, whose single `Release` names how it ended. A block that was announced and not
yet reported pulled counts as a read in flight, so a revoke can never pass an announce on the wire. Nothing here has a
timer: liveness is the shell's, and silence arrives as `broken`. A reader that breaks the protocol ends its own lease,
nothing more.

A lease on cached blocks (a peer's fetch) is SEALED by a record of whole blocks without output, once all that the holder
can give is on its device: most often as soon as it is open.

Does not: know blocks' contents, pools, sockets or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.records import TokenLogprobs, WorkerLedger
from headrace.errors import InvariantError
from headrace.ids import Incarnation, LeaseId, RequestKey


@dataclass(frozen=True, slots=True)
class HandOffRecord:
    """What a reader needs to go on without sampling again; `num_tokens` have their KV in the announced blocks."""

    output_ids: tuple[int, ...]
    num_tokens: int
    finished: bool = False
    """True when the request ended with its first token: nothing to move."""
    ledger: WorkerLedger = field(default_factory=WorkerLedger)
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the last ones of output_ids, which were sampled at the holder; () where the request asks for none."""


def whole_blocks(num_blocks: int, block_size: int) -> HandOffRecord:
    """What seals a lease on cached blocks."""
    return HandOffRecord((), num_blocks * block_size)


@dataclass(frozen=True, slots=True)
class Announce:
    first: int
    """Logical index of blocks[0]."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendHandOff:
    record: HandOffRecord


@dataclass(frozen=True, slots=True)
class SendHeld:
    pass


@dataclass(frozen=True, slots=True)
class SendRevoked:
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Unpin. `completed`: the reader owns the request now."""

    completed: bool


LeaseAction = Announce | SendHandOff | SendHeld | SendRevoked | Release


class LeaseState(Enum):
    OPEN = "open"
    SEALED = "sealed"
    HELD = "held"
    ENDED = "ended"


TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OPEN: frozenset({LeaseState.SEALED, LeaseState.ENDED}),
    LeaseState.SEALED: frozenset({LeaseState.HELD, LeaseState.ENDED}),
    LeaseState.HELD: frozenset({LeaseState.ENDED}),
    LeaseState.ENDED: frozenset(),
}


@dataclass(slots=True)
class Lease:
    """A lease's record; its methods are the facts and return what to do, in order. Facts after the end are no-ops."""

    lease_id: LeaseId
    key: RequestKey
    """Of the request, or made for the pin of a fetch."""
    incarnation: Incarnation
    """The holder's own; a verify for another one is refused."""
    state: LeaseState = LeaseState.OPEN
    announced: list[int] = field(default_factory=list)
    pulled: int = 0
    """Announced blocks that the reader has or does not need."""
    record: HandOffRecord | None = None

    @property
    def read_in_flight(self) -> bool:
        return self.state is not LeaseState.ENDED and len(self.announced) > self.pulled

    @property
    def can_revoke(self) -> bool:
        return self.state in (LeaseState.OPEN, LeaseState.SEALED) and not self.read_in_flight

    def computed(self, blocks: Sequence[int]) -> list[LeaseAction]:
        """`blocks`: all complete blocks of the request so far, in logical order (a later call repeats the earlier
        ones).

        Raises InvariantError when they contradict what was announced.
        """
        known = len(self.announced)
        if self.state is LeaseState.ENDED:
            return []
        if list(blocks[:known]) != self.announced[: len(blocks)]:
            raise InvariantError(f"lease {self.lease_id}: announced blocks changed")
        if len(blocks) <= known:
            return []
        if self.state is not LeaseState.OPEN:
            raise InvariantError(f"lease {self.lease_id}: new blocks after the hand-off")
        new = tuple(blocks[known:])
        self.announced += new
        return [Announce(known, new)]

    def handed_off(self, record: HandOffRecord) -> list[LeaseAction]:
        """The first token is sampled and every block announced. Raises InvariantError on a second, different record."""
        if self.state is LeaseState.ENDED:
            return []
        if self.record is not None:
            if record != self.record:
                raise InvariantError(f"lease {self.lease_id}: two different hand-off records")
            return []
        self.record = record
        _advance(self, LeaseState.SEALED)
        return [SendHandOff(record)]

    def reader_pulled(self, num_blocks: int) -> list[LeaseAction]:
        if self.state is LeaseState.ENDED:
            return []
        if num_blocks > len(self.announced):
            return self._end("protocol")
        self.pulled = max(self.pulled, num_blocks)
        return []

    def verify(self, lease_id: str, incarnation: str) -> list[LeaseAction]:
        """The reader's last read is over. Held is the answer only while the pin is whole and everything was read."""
        if self.state is LeaseState.ENDED or self.state is LeaseState.HELD:
            return []
        if lease_id != self.lease_id or incarnation != self.incarnation:
            return self._end("stale")
        if self.state is not LeaseState.SEALED or self.read_in_flight:
            return self._end("protocol")
        _advance(self, LeaseState.HELD)
        return [SendHeld()]

    def close(self, completed: bool) -> list[LeaseAction]:
        """Completed counts only after Held."""
        return self._end(None, completed=completed and self.state is LeaseState.HELD)

    def broken(self) -> list[LeaseAction]:
        return self._end(None)

    def revoke(self, reason: str) -> list[LeaseAction]:
        """Takes the pin back, unless a read is in flight or Held was answered (then nothing happens)."""
        return self._end(reason) if self.can_revoke else []

    def request_ended(self, reason: str) -> list[LeaseAction]:
        """The request is over at the holder. A read in flight may now see foreign bytes; without Held nobody uses
        them.
        """
        return self._end(None if self.state is LeaseState.HELD else reason)

    def _end(self, revoked: str | None, completed: bool = False) -> list[LeaseAction]:
        if self.state is LeaseState.ENDED:
            return []
        _advance(self, LeaseState.ENDED)
        told: list[LeaseAction] = [] if revoked is None else [SendRevoked(revoked)]
        return [*told, Release(completed)]


def _advance(lease: Lease, to: LeaseState) -> None:
    if to not in TRANSITIONS[lease.state]:
        raise InvariantError(f"lease {lease.lease_id}: {lease.state.value} -> {to.value}")
    lease.state = to


class LeaseTable:
    """The live leases of one holder, by id and by request; at most one a request."""

    def __init__(self) -> None:
        self._by_id: dict[LeaseId, Lease] = {}
        self._by_key: dict[RequestKey, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, lease: Lease) -> bool:
        """False when the request already has a reader. An ended lease whose stream still closes makes way."""
        known = self._by_key.get(lease.key)
        if known is not None and known.state is not LeaseState.ENDED:
            return False
        if lease.lease_id in self._by_id:
            raise InvariantError(f"lease id {lease.lease_id} is taken")
        self._by_id[lease.lease_id] = lease
        self._by_key[lease.key] = lease
        return True

    def get(self, lease_id: LeaseId) -> Lease | None:
        return self._by_id.get(lease_id)

    def of(self, key: RequestKey) -> Lease | None:
        return self._by_key.get(key)

    def remove(self, lease: Lease) -> None:
        """Forgets an ended lease; again is a no-op."""
        if lease.state is not LeaseState.ENDED:
            raise InvariantError(f"lease {lease.lease_id} is still {lease.state.value}")
        if self._by_id.pop(lease.lease_id, None) is not None and self._by_key.get(lease.key) is lease:
            del self._by_key[lease.key]

    @property
    def reads_in_flight(self) -> int:
        return sum(lease.read_in_flight for lease in self._by_id.values())
